// Decode steps of one offloaded sequence as a decode worker computes them (OffloadedStep, hot slots,
// no wait of the host between scores and choice), over the KV of a TextRun in the tier's place: blocks
// come by memcpy. For profiles of a sparse step's operations.
// Owner: the benchmark. Not thread-safe: the calling thread is the engine's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "decode_worker/offload/offloaded_step.h"
#include "kernels/model/text_run.h"
#include "kernels/select/calibration.h"

namespace kvt {

class OffloadedSteps {
 public:
  // `source` (device memory that the host reads in place) holds the KV of positions [0, first), `first`
  // a multiple of 16. Everything borrowed outlives the object. Digests of the whole prefix are made here.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<OffloadedSteps>> Create(
      TextRun& source, const Calibration& calibration, int first, int steps, int budget_tokens);
  ~OffloadedSteps();

  // The token at the next position; digests of the block it completes, too. Returns when all has run.
  [[nodiscard]] absl::StatusOr<OffloadedRowResult> Step(int32_t token);

 private:
  OffloadedSteps(TextRun& source, const Calibration& calibration, int first)
      : source_(source), calibration_(calibration), first_(first), position_(first) {}
  absl::Status Open(int blocks_max);
  void Fetch(int layer, absl::Span<const OffloadedFetch> fetches,
             const std::function<void(const std::vector<bool>&)>& done);
  void FromSource(int layer, int block, SlotPair pair);
  // Runs the engine's tasks until everything enqueued has run and `done`.
  absl::Status Await(const std::function<bool()>& done);

  TextRun& source_;
  const Calibration& calibration_;
  const int first_;
  int position_;
  uint64_t steps_ = 0;
  OffloadBudget budget_;
  std::unique_ptr<DigestHeads> heads_;
  DigestBuffer digests_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<SlotPool> pool_;
  std::optional<OffloadedSlots> slots_;
  std::unique_ptr<TaskQueue> queue_;
  std::unique_ptr<OffloadedStep> step_;
  std::unique_ptr<Stream> stream_;  // drained before what its operations use
  std::optional<OffloadedStepResult> result_;
};

}  // namespace kvt
