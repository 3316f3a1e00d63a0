#include "tests/support/arena_resolver.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/layout/checksum.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<ArenaResolver>> ArenaResolver::Create(
    const ArenaResolverOptions& options) {
  SharedMappingOptions mapping;
  mapping.huge_pages = options.huge_pages;
  const uint64_t bytes = uint64_t{options.records} * options.geometry.RecordBytes();
  KVT_ASSIGN_OR_RETURN(SharedMapping arena, SharedMapping::Create("test-arena", bytes, mapping));
  KVT_ASSIGN_OR_RETURN(RecordTable table, RecordTable::Create(options.records));
  return std::unique_ptr<ArenaResolver>(
      new ArenaResolver(options, std::move(arena), std::move(table)));
}

ArenaResolver::ArenaResolver(const ArenaResolverOptions& options, SharedMapping arena,
                             RecordTable table)
    : options_(options),
      arena_(std::move(arena)),
      table_(std::move(table)),
      generations_(options.records, 0),
      present_(options.records, false) {}

void ArenaResolver::FillPattern(uint32_t index, uint32_t generation, std::byte* out, uint32_t bytes,
                                uint32_t from) {
  const uint64_t seed = (uint64_t{generation} << 32) | index;
  for (uint32_t at = 0; at < bytes; at += 8) {
    const uint64_t word = CounterRandom(seed, from + at);
    std::memcpy(out + at, &word, 8);
  }
}

uint64_t ArenaResolver::Seal(uint32_t index) {
  MutexLock lock(mu_);
  table_.Withdraw(index);
  const uint32_t generation = ++generations_[index];
  FillPattern(index, generation, arena_.mutable_data() + OffsetOf(index),
              options_.geometry.RecordBytes());
  present_[index] = true;
  const uint64_t handle = MakeRecordHandle(index, generation);
  table_.Publish(handle, OffsetOf(index));
  return handle;
}

uint64_t ArenaResolver::Reserve(uint32_t index) {
  MutexLock lock(mu_);
  table_.Withdraw(index);
  std::memset(arena_.mutable_data() + OffsetOf(index), 0, options_.geometry.RecordBytes());
  present_[index] = true;
  return MakeRecordHandle(index, ++generations_[index]);
}

void ArenaResolver::Evict(uint32_t index) {
  MutexLock lock(mu_);
  table_.Withdraw(index);
  ++generations_[index];
  present_[index] = false;
}

void ArenaResolver::CorruptByte(uint32_t index, uint32_t byte) {
  MutexLock lock(mu_);
  arena_.mutable_data()[OffsetOf(index) + byte] ^= std::byte{0x10};
}

const std::byte* ArenaResolver::data(uint32_t index) const {
  return arena_.data() + OffsetOf(index);
}

std::vector<uint64_t> ArenaResolver::Checksums(uint32_t index) const {
  const uint32_t slice = options_.geometry.SliceBytes();
  std::vector<uint64_t> sums;
  for (uint32_t i = 0; i < options_.geometry.SlicesPerRecord(); ++i) {
    sums.push_back(SliceChecksum(data(index) + uint64_t{i} * slice, slice,
                                 ChecksumSeed(KeyHash(index), Plane::kBase, i)));
  }
  return sums;
}

int ArenaResolver::in_flight() const {
  MutexLock lock(mu_);
  return in_flight_;
}

int ArenaResolver::attached() const {
  MutexLock lock(mu_);
  return attached_;
}

uint64_t ArenaResolver::committed_bytes() const {
  MutexLock lock(mu_);
  return committed_;
}

std::vector<uint64_t> ArenaResolver::last_checksums() const {
  MutexLock lock(mu_);
  return last_checksums_;
}

absl::Status ArenaResolver::Attach(const SessionToken& token) {
  MutexLock lock(mu_);
  if (token.session != options_.token.session || token.secret != options_.token.secret) {
    return absl::PermissionDeniedError(
        absl::StrCat("session ", token.session.value(), " is unknown or its secret wrong"));
  }
  if (token.geometry != options_.geometry) {
    return absl::FailedPreconditionError(absl::StrCat(
        "geometry: client ", token.geometry.ToString(), ", store ", options_.geometry.ToString()));
  }
  ++attached_;
  return absl::OkStatus();
}

void ArenaResolver::Detach(SessionId) {
  MutexLock lock(mu_);
  KVT_CHECK(--attached_ >= 0);
}

PieceStatus ArenaResolver::Check(const Piece& piece) const {
  if (piece.ticket == kForbiddenTicket) return PieceStatus::kRefused;
  if (piece.ticket == kExpiredTicket) return PieceStatus::kExpired;
  const uint32_t index = RecordIndexOf(piece.handle);
  if (piece.reserved != 0 || index >= options_.records ||
      uint64_t{piece.offset} + piece.length > options_.geometry.RecordBytes()) {
    return PieceStatus::kInvalid;
  }
  const bool here = present_[index] && generations_[index] == GenerationOf(piece.handle);
  return here ? PieceStatus::kOk : PieceStatus::kLost;
}

void ArenaResolver::ResolvePull(SessionId, absl::Span<const Piece> pieces,
                                absl::Span<ResolvedPull> out) {
  MutexLock lock(mu_);
  for (size_t i = 0; i < pieces.size(); ++i) {
    out[i].status = Check(pieces[i]);
    if (out[i].status != PieceStatus::kOk) continue;
    out[i].data = data(RecordIndexOf(pieces[i].handle)) + pieces[i].offset;
    ++in_flight_;
  }
}

void ArenaResolver::ReleasePull(SessionId, absl::Span<const Piece> pieces) {
  MutexLock lock(mu_);
  in_flight_ -= static_cast<int>(pieces.size());
  KVT_CHECK(in_flight_ >= 0);
}

void ArenaResolver::ResolvePush(SessionId, absl::Span<const Piece> pieces,
                                absl::Span<ResolvedPush> out) {
  MutexLock lock(mu_);
  for (size_t i = 0; i < pieces.size(); ++i) {
    out[i].status = Check(pieces[i]);
    if (out[i].status != PieceStatus::kOk) continue;
    const uint32_t index = RecordIndexOf(pieces[i].handle);
    out[i].data = arena_.mutable_data() + OffsetOf(index) + pieces[i].offset;
    out[i].key_hash = KeyHash(index);
    out[i].plane = Plane::kBase;
    ++in_flight_;
  }
}

void ArenaResolver::CommitPush(SessionId, absl::Span<const PushedPiece> pieces,
                               absl::Span<PieceStatus> verdicts) {
  MutexLock lock(mu_);
  in_flight_ -= static_cast<int>(pieces.size());
  KVT_CHECK(in_flight_ >= 0);
  for (size_t i = 0; i < pieces.size(); ++i) {
    KVT_CHECK(verdicts[i] == pieces[i].status);
    if (pieces[i].status != PieceStatus::kOk) continue;
    committed_ += pieces[i].piece.length;
    last_checksums_.assign(pieces[i].checksums.begin(), pieces[i].checksums.end());
  }
}

}  // namespace kvt
