// Runs one decode step on the device: one row for each sequence of the batch, through all layers, to
// a sampled token each. Everything is enqueued at once; a device callback posts the result into the
// engine's queue, so the engine thread waits for nothing.
//
// One step in flight. Owned and called by the engine thread; `step_done` runs there too.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"
#include "kvstore/client/task_queue.h"

namespace kvt {

struct DecodeRow {
  int table_row = 0;
  int position = 0;
  int32_t token = 0;  // at that position; its KV is written
  SampleParams sample;  // of the next one
};

struct DecodeStepResult {
  uint64_t step = 0;
  std::vector<int32_t> tokens;  // one per row; kTokenInvalid: NaN
  uint64_t saturated = 0;
};

class DecodeStep {
 public:
  static absl::StatusOr<std::unique_ptr<DecodeStep>> Create(
      const Transformer& transformer, KvCache& cache, TaskQueue& queue, int rows,
      std::function<void(const DecodeStepResult&)> step_done);
  // The device is drained.
  ~DecodeStep();

  // Sets the table of a row, pairs[layer * blocks + block]; kept alive until the device has read it.
  void SetTable(int row, int blocks, std::shared_ptr<const std::vector<SlotPair>> pairs);
  // Requires !busy().
  void Enqueue(uint64_t step, absl::Span<const DecodeRow> rows);
  [[nodiscard]] bool busy() const { return busy_; }
  // For the steps of the other class: never at the same time.
  [[nodiscard]] Stream& stream() { return *stream_; }

 private:
  DecodeStep(const Transformer& transformer, KvCache& cache, TaskQueue& queue,
             std::function<void(const DecodeStepResult&)> step_done);
  void Done(uint64_t step, size_t rows);

  const Transformer& transformer_;
  KvCache& cache_;
  TaskQueue& queue_;
  const std::function<void(const DecodeStepResult&)> step_done_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::shared_ptr<const std::vector<SlotPair>>> tables_;  // since the last Enqueue
  std::vector<std::shared_ptr<const std::vector<SlotPair>>> step_tables_;  // of the running step
  bool busy_ = false;
};

}  // namespace kvt
