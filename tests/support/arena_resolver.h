// A small store behind the PieceResolver interface, for the transport's tests and benchmark: a real
// arena and record table, records of one geometry, contents that any process can recompute.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "kernels/layout/geometry.h"
#include "kvstore/media/record_table.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/transport/transport_server.h"

namespace kvt {

struct ArenaResolverOptions {
  Geometry geometry;
  uint32_t records = 0;
  bool huge_pages = true;
  // The one session let in.
  SessionToken token;
};

class ArenaResolver final : public PieceResolver {
 public:
  // Pieces of this ticket are refused: no pin.
  static constexpr uint64_t kForbiddenTicket = 666;
  // Pieces of this ticket are told that their session has ended.
  static constexpr uint64_t kExpiredTicket = 667;

  static absl::StatusOr<std::unique_ptr<ArenaResolver>> Create(const ArenaResolverOptions& options);

  // What the record of that index and generation holds, and the checksum of each of its slices.
  static void FillPattern(uint32_t index, uint32_t generation, std::byte* out, uint32_t bytes,
                          uint32_t from = 0);
  static uint64_t KeyHash(uint32_t index) { return 0x1234567ull * (index + 1); }

  // Writes the pattern and publishes the record; returns its handle.
  uint64_t Seal(uint32_t index);
  // Reserves the record for a push: unpublished, zeroed; returns its handle.
  uint64_t Reserve(uint32_t index);
  // The record goes: its handle is stale from now on.
  void Evict(uint32_t index);
  // Flips one bit of the record.
  void CorruptByte(uint32_t index, uint32_t byte);

  [[nodiscard]] const std::byte* data(uint32_t index) const;
  [[nodiscard]] std::vector<uint64_t> Checksums(uint32_t index) const;
  [[nodiscard]] int in_flight() const;
  [[nodiscard]] int attached() const;
  [[nodiscard]] uint64_t committed_bytes() const;
  // The checksums of the last CommitPush.
  [[nodiscard]] std::vector<uint64_t> last_checksums() const;
  [[nodiscard]] const SharedMapping& arena() const { return arena_; }
  [[nodiscard]] const RecordTable& table() const { return table_; }

  absl::Status Attach(const SessionToken& token) override;
  void Detach(SessionId session) override;
  void ResolvePull(SessionId session, absl::Span<const Piece> pieces,
                   absl::Span<ResolvedPull> out) override;
  void ReleasePull(SessionId session, absl::Span<const Piece> pieces) override;
  void ResolvePush(SessionId session, absl::Span<const Piece> pieces,
                   absl::Span<ResolvedPush> out) override;
  void CommitPush(SessionId session, absl::Span<const PushedPiece> pieces,
                  absl::Span<PieceStatus> verdicts) override;

 private:
  ArenaResolver(const ArenaResolverOptions& options, SharedMapping arena, RecordTable table);
  [[nodiscard]] PieceStatus Check(const Piece& piece) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  [[nodiscard]] uint64_t OffsetOf(uint32_t index) const {
    return uint64_t{index} * options_.geometry.RecordBytes();
  }

  const ArenaResolverOptions options_;
  SharedMapping arena_;
  RecordTable table_;
  mutable Mutex mu_;
  std::vector<uint32_t> generations_ ABSL_GUARDED_BY(mu_);
  std::vector<bool> present_ ABSL_GUARDED_BY(mu_);
  int in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  int attached_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t committed_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<uint64_t> last_checksums_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvt
