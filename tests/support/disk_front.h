// A store's disk, played: in front of a real StoreNode's data plane it says of chosen records that
// they lie on disk alone, until a Promote brings them back as the test orders. What the node itself
// does with a real medium is tested elsewhere; this is for who stands above it and cannot order a
// real disk to be late. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "kernels/base/mutex.h"
#include "kvstore/media/record_table.h"
#include "kvstore/wire/store_api.h"
#include "tests/support/forwarding_resolver.h"

namespace kvt {

class DiskFront final : public ForwardingResolver {
 public:
  // How a Promote ends for records that are on disk.
  enum class Answer {
    kRead,      // at once
    kReadHalf,  // half of the records of each call (at least one); the others are late
    kNoRoom,
    kLost,
    kLate,      // not before SetAnswer; each call waits as long as it may
    kRespill,   // resident, but on disk again before it is pulled
  };

  // Both outlive the front.
  DiskFront(PieceResolver& node, RecordTable& table) : ForwardingResolver(node), table_(table) {}

  // The planes of a sealed block go to disk.
  void Spill(const BlockPlace& place, bool base = true, bool residual = true);
  void SetAnswer(Answer answer);
  [[nodiscard]] PromoteReply Promote(const PromoteRequest& request);
  [[nodiscard]] int promotes() const { return promotes_.load(); }
  [[nodiscard]] int promotes_at_once_max() const { return at_once_max_.load(); }

  void ResolvePull(SessionId session, absl::Span<const Piece> pieces,
                   absl::Span<ResolvedPull> out) override;

 private:
  RecordTable& table_;
  std::atomic<int> promotes_{0};
  std::atomic<int> at_once_{0};
  std::atomic<int> at_once_max_{0};
  Mutex mu_;
  CondVar changed_;
  Answer answer_ ABSL_GUARDED_BY(mu_) = Answer::kRead;
  absl::flat_hash_map<uint64_t, uint64_t> on_disk_ ABSL_GUARDED_BY(mu_);  // record -> arena offset
};

}  // namespace kvt
