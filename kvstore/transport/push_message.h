// One push message: up to 15 pieces (or parts of pieces: a sub-piece is a piece of its own) with
// their checksums and bytes. The same for shared memory and ucx:
//
//   meta = Piece[count] | uint64 checksum[slices of all pieces]    (no checksums: flag in the
//   header) data = the pieces' bytes, one after the other
//
// The header around it is the transport's. Answers carry one verdict per piece of a message, and
// messages of a channel are answered in the order they were sent.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvstore/transport/burst_pool.h"
#include "kvstore/transport/transport_server.h"

namespace kvt {

// Slices are at least 1 KiB (head_dim 32).
inline constexpr uint32_t kSliceBytesMin = 2 * kBlockTokens * 32;
inline constexpr int kMessageChecksumsMax = kMessageBytesMax / kSliceBytesMin;
inline constexpr size_t kPushMetaBytesMax =
    kMessagePiecesMax * sizeof(Piece) + kMessageChecksumsMax * sizeof(uint64_t);

using MessageStatuses = std::array<PieceStatus, 16>;
static_assert(kMessagePiecesMax <= 16);

struct PushLimits {
  int pieces_max = kMessagePiecesMax;
  uint32_t bytes_max = kMessageBytesMax;
  int runs_max = 0;  // contiguous source runs; zero: any number
};

// The client's side of one message. Plain memory of fixed size: reused.
struct PushMessage {
  uint64_t burst = 0;
  int count = 0;
  uint32_t bytes = 0;
  bool has_checksums = false;
  std::array<Piece, kMessagePiecesMax> pieces;
  std::array<uint32_t, kMessagePiecesMax> items;  // the burst's item of each piece
  std::array<uint32_t, kMessagePiecesMax> from;   // and the piece's first byte within the item

  // Takes as much of the burst's unsent rest as fits, and advances the burst. False: nothing left.
  bool Fill(Burst& burst, uint32_t slice_bytes, const PushLimits& limits);
  [[nodiscard]] size_t MetaBytes(uint32_t slice_bytes) const;
  // Writes pieces and checksums; they are in the items by then.
  void WriteMeta(const Burst& burst, uint32_t slice_bytes, std::byte* out) const;
  // Records the peer's verdicts; the last sub-piece of an item decides with the worst of all.
  void Settle(BurstPool& pool, Burst& burst, const MessageStatuses& statuses) const;
};

// The store's side: applies messages to the arena. One per connection; its memory is its own.
class PushApplier {
 public:
  // `wire_version`: the connection's; verdicts are those that it knows.
  PushApplier(PieceResolver& resolver, SessionId session, uint32_t slice_bytes,
              uint16_t wire_version)
      : resolver_(resolver),
        session_(session),
        slice_bytes_(slice_bytes),
        wire_version_(wire_version) {}

  // Resolves, copies and verifies, commits. InvalidArgument when malformed: nothing was written.
  // `meta` and `data` may be unaligned.
  absl::Status Apply(int count, bool has_checksums, absl::Span<const std::byte> meta,
                     absl::Span<const std::byte> data, MessageStatuses& statuses);
  [[nodiscard]] uint32_t slice_bytes() const { return slice_bytes_; }
  // The meta bytes that stand before the data, if a message of `bytes` is well-formed as far as its
  // header can tell; InvalidArgument otherwise.
  absl::StatusOr<size_t> MetaBytes(int count, bool has_checksums, size_t data_bytes,
                                   size_t bytes) const;

 private:
  PieceResolver& resolver_;
  const SessionId session_;
  const uint32_t slice_bytes_;
  const uint16_t wire_version_;
  std::array<Piece, kMessagePiecesMax> pieces_;
  std::array<ResolvedPush, kMessagePiecesMax> resolved_;
  std::array<PushedPiece, kMessagePiecesMax> pushed_;
  std::array<PieceStatus, kMessagePiecesMax> verdicts_;
  std::array<uint64_t, kMessageChecksumsMax> checksums_;
};

}  // namespace kvt
