// Runs one step of chunks on the device, layer by layer, and says when the KV of each layer is
// written, so that its blocks are pushed while the next layer computes (DESIGN 5). The whole step is
// enqueued at once; device callbacks post notices into the engine's queue, so the engine thread
// waits for nothing.
//
// One step in flight. Owned and called by the engine thread; the handlers run there too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"
#include "kvstore/client/task_queue.h"
#include "prefill_worker/first_selection.h"

namespace kvt {

struct PipelineSegment {
  int table_row = 0;
  int first_position = 0;
  absl::Span<const int32_t> tokens;    // valid until Enqueue returns
  std::optional<SampleParams> sample;  // set: the last row is sampled
  // Not null: its last step; digests and the last row's selection go here, valid until step_done.
  FirstSelection* selection = nullptr;
};

struct PipelineResult {
  uint64_t step = 0;
  std::vector<int32_t> tokens;  // of the segments with `sample`, in order
  uint64_t saturated = 0;       // values beyond fp16 in steps that sampled
};

// When a layer's compute ended and its KV was written, for the trace.
struct LayerTimes {
  absl::Time began;
  absl::Time written;
  absl::Time ended;
};

struct PipelineHandlers {
  std::function<void(uint64_t step, int layer)> layer_written;
  std::function<void(const PipelineResult&)> step_done;
};

class LayerPipeline {
 public:
  // `transformer`, `cache`, `queue` and `selector` (null: no segment has a selection) outlive the
  // pipeline. Steps have at most `rows` tokens in `segments` segments.
  static absl::StatusOr<std::unique_ptr<LayerPipeline>> Create(const Transformer& transformer,
                                                               KvCache& cache, TaskQueue& queue,
                                                               int rows, int segments,
                                                               FirstSelector* selector,
                                                               PipelineHandlers handlers);
  // The device is drained.
  ~LayerPipeline();

  // Sets the table of a row, pairs[layer * blocks + block]; kept alive until the device has read it.
  void SetTable(int row, int blocks, std::shared_ptr<const std::vector<SlotPair>> pairs);
  // Requires !busy().
  void Enqueue(uint64_t step, absl::Span<const PipelineSegment> segments);
  [[nodiscard]] bool busy() const { return busy_; }
  // Of the running or the last step, one entry a layer; an entry is complete when step_done runs.
  [[nodiscard]] const std::vector<LayerTimes>& times() const { return times_; }

 private:
  LayerPipeline(const Transformer& transformer, KvCache& cache, TaskQueue& queue,
                FirstSelector* selector, PipelineHandlers handlers);
  void Done(uint64_t step, int sampled);

  const Transformer& transformer_;
  KvCache& cache_;
  TaskQueue& queue_;
  FirstSelector* const selector_;
  const PipelineHandlers handlers_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<Stream> stream_;
  std::vector<LayerTimes> times_;
  std::vector<std::shared_ptr<const std::vector<SlotPair>>> tables_;  // since the last Enqueue
  std::vector<std::shared_ptr<const std::vector<SlotPair>>> step_tables_;  // of the running step
  bool busy_ = false;
};

}  // namespace kvt
