// What a step of the offloaded batch brings from the tier for one layer: one pull for all rows. A block
// that is lost on the way (its store is busy or gone, the link broke, a byte was wrong) is looked up
// afresh, wherever it may be, and pulled once more; while a store that may have it cannot be reached the
// lookup is repeated, for kMissRetryFor at most. What is then still lost fails its row, and so do the
// row's later fetches in the step, at once: the row is computed again (prefill). Engine thread only; kept
// through shared_ptr until `done` has run.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "decode_worker/decode_metrics.h"
#include "decode_worker/engine/sequence.h"
#include "decode_worker/offload/block_pull.h"
#include "decode_worker/offload/offloaded_step.h"
#include "kernels/base/clock.h"
#include "kernels/model/kv_cache.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/client/task_queue.h"
#include "kvstore/client/tier_client.h"

namespace kvt {

// The whole batch waits for it: less than a prefill takes, more than a link needs to come back.
inline constexpr absl::Duration kMissRetryFor = absl::Seconds(1);
inline constexpr absl::Duration kMissRetryPause = absl::Milliseconds(50);

class StepFetch : public std::enable_shared_from_this<StepFetch> {
 public:
  using Rows = std::vector<std::shared_ptr<Sequence>>;
  struct Deps {
    TierClient& tier;
    TaskQueue& queue;
    CallPool& control;
    const Clock& clock;
    KvCache& cache;
    DecodeMetrics& metrics;
    std::function<void(absl::Time, Task)> at;
  };

  // `rows` of the step stay in it until `done`, which runs once, later, on the engine thread, with one
  // word for each fetch.
  StepFetch(Deps deps, int layer, Rows rows, absl::Span<const OffloadedFetch> fetches,
            std::function<void(const std::vector<bool>&)> done);
  void Start();

 private:
  [[nodiscard]] Sequence& Row(size_t fetch) const {
    return *rows_[static_cast<size_t>(fetches_[fetch].row)];
  }
  [[nodiscard]] bool Wanted(size_t fetch) const;
  void Pull(std::vector<size_t> wanted);
  void OnPulled(const BlockPull& pull, const std::vector<size_t>& wanted,
                const TransferResult& result);
  void LookAgain();
  void OnFound(const std::vector<LookupResult>& found);
  void Finish();

  const Deps deps_;
  const int layer_;
  const Rows rows_;
  const std::vector<OffloadedFetch> fetches_;
  const std::function<void(const std::vector<bool>&)> done_;
  std::vector<bool> ok_;
  std::vector<size_t> lost_;  // fetches to be tried again
  bool retried_ = false;
  absl::Time retry_until_;
};

}  // namespace kvt
