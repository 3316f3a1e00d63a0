// The data plane's side of a store node. Control calls: store_node.cc.
#include <openssl/crypto.h>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/layout/checksum.h"
#include "kvstore/node/store_node.h"

namespace kvt {
namespace {

static_assert(MakeRecordHandle(2 * 5 + 1, 7) ==
              PlaneRecordHandle(MakeBlockHandle(5, 7), Plane::kResidual));

PieceStatus StatusOf(Access access) {
  switch (access) {
    case Access::kOk:
      return PieceStatus::kOk;
    case Access::kLost:
      return PieceStatus::kLost;
    case Access::kRefused:
      return PieceStatus::kRefused;
    case Access::kInvalid:
      return PieceStatus::kInvalid;
    case Access::kOnDisk:
      return PieceStatus::kOnDisk;
    case Access::kExpired:
      return PieceStatus::kExpired;
  }
  KVT_CHECK(false, "access ", static_cast<int>(access));
}

// How many pieces ahead of its turn a piece's block is fetched: of a scattered burst each misses the cache.
constexpr size_t kLookAhead = 8;

bool IsWellFormed(const Piece& piece) {
  return piece.reserved == 0 && piece.offset % kPieceAlignment == 0 &&
         piece.length % kPieceAlignment == 0;
}

RecordRange RangeOf(const Piece& piece) {
  return RecordRange{TicketId(piece.ticket), TicketEpoch(piece.ticket_epoch), piece.handle,
                     piece.offset, piece.length};
}

uint64_t BlockHandleOf(uint64_t record_handle) {
  return MakeBlockHandle(BlockOfRecord(record_handle), GenerationOfHandle(record_handle));
}

}  // namespace

void StoreNode::PrefetchFirst(absl::Span<const Piece> pieces) const {
  for (const Piece& piece : pieces.subspan(0, kLookAhead)) index_.Prefetch(piece.handle);
}

void StoreNode::PrefetchAhead(absl::Span<const Piece> pieces, size_t at) const {
  if (at + kLookAhead < pieces.size()) index_.Prefetch(pieces[at + kLookAhead].handle);
}

absl::Status StoreNode::Attach(const SessionToken& token) {
  MutexLock lock(mu_);
  const Session* const session = index_.FindSession(token.session);
  if (session == nullptr || session->secret.size() != token.secret.size() ||
      CRYPTO_memcmp(session->secret.data(), token.secret.data(), token.secret.size()) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("store ", config_.name, " has no such session, or its secret is another"));
  }
  if (token.geometry != session->geometry) {
    return absl::FailedPreconditionError(absl::StrCat(
        "geometry: the channel says ", token.geometry.ToString(), ", the session of ",
        session->worker, " at store ", config_.name, " ", session->geometry.ToString()));
  }
  int& channels = channels_[token.session];
  if (channels >= kSessionChannelsMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        session->worker, " has ", channels, " channels to store ", config_.name, " already"));
  }
  ++channels;
  return absl::OkStatus();
}

void StoreNode::Detach(SessionId session) {
  MutexLock lock(mu_);
  const auto it = channels_.find(session);
  KVT_CHECK(it != channels_.end(), "session ", session.value(), " was not attached");
  if (--it->second == 0) channels_.erase(it);
}

void StoreNode::ResolvePull(SessionId session, absl::Span<const Piece> pieces,
                            absl::Span<ResolvedPull> out) {
  KVT_CHECK(pieces.size() == out.size());
  MutexLock lock(mu_);
  ReadCursor cursor;
  PrefetchFirst(pieces);
  for (size_t i = 0; i < pieces.size(); ++i) {
    PrefetchAhead(pieces, i);
    const Piece& piece = pieces[i];
    out[i] = ResolvedPull{nullptr, PieceStatus::kInvalid};
    if (!IsWellFormed(piece)) continue;
    uint64_t offset = 0;
    out[i].status = StatusOf(index_.BeginRead(session, RangeOf(piece), &offset, &cursor));
    if (out[i].status != PieceStatus::kOk) continue;
    out[i].data = arena_.data() + offset;
    pulled_bytes_ += piece.length;
  }
}

void StoreNode::ReleasePull(SessionId, absl::Span<const Piece> pieces) {
  MutexLock lock(mu_);
  PrefetchFirst(pieces);
  for (size_t i = 0; i < pieces.size(); ++i) {
    PrefetchAhead(pieces, i);
    index_.EndRead(pieces[i].handle);
  }
}

absl::Status StoreNode::Verify(const VerifyRequest& request) {
  for (const uint64_t record : request.records) {
    RecordRange range{request.ticket.id, request.ticket.epoch, record, 0, 0};
    Geometry geometry;
    uint64_t key_hash = 0;
    uint64_t offset = 0;
    std::vector<uint64_t> expected;
    const Plane plane = PlaneOfRecord(record);
    {
      MutexLock lock(mu_);
      const Session* const session = index_.FindSession(request.session);
      if (session == nullptr) return absl::NotFoundError("no such session");
      geometry = session->geometry;
      range.length = geometry.RecordBytes();
      if (index_.BeginRead(request.session, range, &offset) != Access::kOk) continue;
      key_hash = index_.FindBlock(BlockHandleOf(record))->key.Hash64();
      const absl::Span<const uint64_t> kept =
          checksums_.Get(BlockOfRecord(record), GenerationOfHandle(record), plane);
      expected.assign(kept.begin(), kept.end());
    }
    bool intact = true;
    for (uint32_t slice = 0; slice < expected.size() && intact; ++slice) {
      const std::byte* const bytes =
          arena_.data() + offset + uint64_t{slice} * geometry.SliceBytes();
      intact = SliceChecksum(bytes, geometry.SliceBytes(),
                             ChecksumSeed(key_hash, plane, slice)) == expected[slice];
    }
    MutexLock lock(mu_);
    index_.EndRead(record);
    if (intact) continue;
    ++checksum_failures_;
    index_.Condemn(BlockHandleOf(record));
    KVT_LOG(kWarning, "a stored block is corrupt and is given up: record ", record);
  }
  return absl::OkStatus();
}

void StoreNode::ResolvePush(SessionId session, absl::Span<const Piece> pieces,
                            absl::Span<ResolvedPush> out) {
  KVT_CHECK(pieces.size() == out.size());
  MutexLock lock(mu_);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    out[i] = ResolvedPush();
    out[i].status = PieceStatus::kInvalid;
    if (!IsWellFormed(piece)) continue;
    uint64_t offset = 0;
    out[i].status = StatusOf(index_.BeginWrite(session, RangeOf(piece), &offset));
    if (out[i].status != PieceStatus::kOk) continue;
    out[i].data = arena_.data() + offset;
    out[i].key_hash = index_.FindBlock(BlockHandleOf(piece.handle))->key.Hash64();
    out[i].plane = PlaneOfRecord(piece.handle);
  }
}

void StoreNode::KeepChecksums(const PushedPiece& pushed) {
  const Block* const block = index_.FindBlock(BlockHandleOf(pushed.piece.handle));
  KVT_CHECK(block != nullptr, "record ", pushed.piece.handle, " is not in flight");
  const Geometry& geometry = index_.GeometryOf(*block);
  const uint32_t number = BlockOfRecord(pushed.piece.handle);
  const uint32_t slices = geometry.SlicesPerRecord();
  const Plane plane = PlaneOfRecord(pushed.piece.handle);
  const uint32_t count = pushed.piece.length / geometry.SliceBytes();
  if (pushed.checksums.empty()) {
    checksums_.SetNone(number, block->generation, slices, plane);
    return;
  }
  KVT_CHECK(pushed.checksums.size() == count, pushed.checksums.size(), " checksums for ", count);
  checksums_.Set(number, block->generation, slices, plane,
                 pushed.piece.offset / geometry.SliceBytes(), pushed.checksums);
}

void StoreNode::CommitPush(SessionId, absl::Span<const PushedPiece> pieces,
                           absl::Span<PieceStatus> verdicts) {
  KVT_CHECK(pieces.size() == verdicts.size());
  MutexLock lock(mu_);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const PushedPiece& pushed = pieces[i];
    const bool arrived = pushed.status == PieceStatus::kOk;
    verdicts[i] = pushed.status;
    if (pushed.status == PieceStatus::kCorrupt) ++checksum_failures_;
    // Before the block may seal.
    if (arrived) KeepChecksums(pushed);
    const bool there = index_.EndWrite(RangeOf(pushed.piece), arrived);
    if (!there) {
      verdicts[i] = PieceStatus::kLost;
    } else if (arrived) {
      pushed_bytes_ += pushed.piece.length;
    }
  }
}

}  // namespace kvt
