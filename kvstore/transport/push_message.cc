#include "kvstore/transport/push_message.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/layout/checksum.h"
#include "kvstore/transport/piece_copy.h"

namespace kvt {

bool PushMessage::Fill(Burst& from_burst, uint32_t slice_bytes, const PushLimits& limits) {
  burst = from_burst.id.value();
  has_checksums = from_burst.checksums != PushChecksums::kNone;
  count = 0;
  bytes = 0;
  const uint32_t unit = has_checksums ? slice_bytes : kPieceAlignment;
  int runs_left = limits.runs_max;
  while (!from_burst.all_sent() && count < limits.pieces_max) {
    const PushItem& item = from_burst.pushes[from_burst.next_item];
    const uint32_t start = from_burst.next_byte;
    uint32_t take = item.piece.length - start;
    if (take > limits.bytes_max - bytes) take = (limits.bytes_max - bytes) / unit * unit;
    if (limits.runs_max > 0) {
      const uint64_t room = uint64_t{item.part_bytes} * static_cast<uint64_t>(runs_left);
      const uint64_t used = start % item.part_bytes;
      if (runs_left == 0) break;
      take = static_cast<uint32_t>(std::min<uint64_t>(take, room - used));
      runs_left -= static_cast<int>(CeilDiv(used + take, item.part_bytes));
    }
    if (take == 0) break;
    const auto at = static_cast<size_t>(count++);
    pieces[at] = item.piece;
    pieces[at].offset += start;
    pieces[at].length = take;
    items[at] = from_burst.next_item;
    from[at] = start;
    bytes += take;
    from_burst.next_byte += take;
    if (from_burst.next_byte == item.piece.length) {
      ++from_burst.next_item;
      from_burst.next_byte = 0;
    }
  }
  return count > 0;
}

size_t PushMessage::MetaBytes(uint32_t slice_bytes) const {
  return static_cast<size_t>(count) * sizeof(Piece) +
         (has_checksums ? bytes / slice_bytes * sizeof(uint64_t) : 0);
}

void PushMessage::WriteMeta(const Burst& from_burst, uint32_t slice_bytes, std::byte* out) const {
  std::memcpy(out, pieces.data(), static_cast<size_t>(count) * sizeof(Piece));
  if (!has_checksums) return;
  out += static_cast<size_t>(count) * sizeof(Piece);
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const size_t size = pieces[i].length / slice_bytes * sizeof(uint64_t);
    std::memcpy(out, from_burst.pushes[items[i]].checksums + from[i] / slice_bytes, size);
    out += size;
  }
}

void PushMessage::Settle(BurstPool& pool, Burst& to, const MessageStatuses& statuses) const {
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    PieceStatus& kept = to.statuses[items[i]];
    // kNotAttempted: all sub-pieces so far were good.
    if (kept == PieceStatus::kNotAttempted && statuses[i] != PieceStatus::kOk) kept = statuses[i];
    if (from[i] + pieces[i].length < to.pushes[items[i]].piece.length) continue;
    pool.SetVerdict(to, items[i], kept == PieceStatus::kNotAttempted ? PieceStatus::kOk : kept);
  }
}

absl::StatusOr<size_t> PushApplier::MetaBytes(int count, bool has_checksums, size_t data_bytes,
                                              size_t bytes) const {
  if (count < 1 || count > kMessagePiecesMax || data_bytes == 0 || data_bytes > kMessageBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("push: message of ", count, " pieces and ", data_bytes, " bytes"));
  }
  const size_t meta = static_cast<size_t>(count) * sizeof(Piece) +
                      (has_checksums ? data_bytes / slice_bytes_ * sizeof(uint64_t) : 0);
  if (bytes != meta + data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("push: message of ", bytes, " bytes, not ", meta + data_bytes));
  }
  return meta;
}

absl::Status PushApplier::Apply(int count, bool has_checksums, absl::Span<const std::byte> meta,
                                absl::Span<const std::byte> data, MessageStatuses& statuses) {
  const auto n = static_cast<size_t>(count);
  std::memcpy(pieces_.data(), meta.data(), n * sizeof(Piece));
  const size_t sums = (meta.size() - n * sizeof(Piece)) / sizeof(uint64_t);
  KVT_CHECK(sums <= checksums_.size(), "checksums ", sums);
  std::memcpy(checksums_.data(), meta.data() + n * sizeof(Piece), sums * sizeof(uint64_t));
  const uint32_t unit = has_checksums ? slice_bytes_ : kPieceAlignment;
  uint64_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    total += pieces_[i].length;
    if (pieces_[i].length == 0 || pieces_[i].length % unit != 0 || pieces_[i].offset % unit != 0 ||
        pieces_[i].reserved != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("push: piece of ", pieces_[i].length, " bytes at ", pieces_[i].offset));
    }
  }
  if (total != data.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("push: pieces of ", total, " bytes in ", data.size()));
  }

  resolver_.ResolvePush(session_, absl::MakeConstSpan(pieces_.data(), n),
                        absl::MakeSpan(resolved_.data(), n));
  size_t pushed = 0;
  size_t at = 0;
  size_t sum_at = 0;
  for (size_t i = 0; i < n; ++i) {
    const size_t slices = has_checksums ? pieces_[i].length / slice_bytes_ : 0;
    const auto checksums = absl::MakeConstSpan(checksums_.data() + sum_at, slices);
    statuses[i] = resolved_[i].status;
    if (resolved_[i].status == PieceStatus::kOk) {
      const bool good =
          StorePiece(resolved_[i], pieces_[i], data.data() + at, slice_bytes_, checksums);
      statuses[i] = good ? PieceStatus::kOk : PieceStatus::kCorrupt;
      pushed_[pushed] = PushedPiece{pieces_[i], statuses[i], checksums};
      verdicts_[pushed++] = statuses[i];
    }
    at += pieces_[i].length;
    sum_at += slices;
  }
  StreamingFence();
  resolver_.CommitPush(session_, absl::MakeConstSpan(pushed_.data(), pushed),
                       absl::MakeSpan(verdicts_.data(), pushed));
  for (size_t i = 0, j = 0; i < n; ++i) {
    if (resolved_[i].status == PieceStatus::kOk) statuses[i] = verdicts_[j++];
    statuses[i] = VerdictIn(wire_version_, statuses[i]);
  }
  return absl::OkStatus();
}

}  // namespace kvt
