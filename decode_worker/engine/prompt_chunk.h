// Computes the KV of some tokens of one sequence on the decode worker's device, a chunk at a time:
// what decode falls back to when no store is reachable (docs/decisions/0006). No logits: the step
// that follows takes the sequence's last token.
//
// One chunk in flight, and no decode step meanwhile: the two share the device. Owned and called by
// the engine thread; `done` runs there too.
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

// Tokens of a chunk: how long running sequences wait for one.
inline constexpr int kPromptChunkTokens = 128;
static_assert(kPromptChunkTokens % kBlockTokens == 0);

class PromptChunk {
 public:
  static absl::StatusOr<std::unique_ptr<PromptChunk>> Create(const Transformer& transformer,
                                                             KvCache& cache, TaskQueue& queue);
  // The device is drained.
  ~PromptChunk();

  // `pairs`: the row's table from block 0, pairs[layer * blocks + block]. At most kPromptChunkTokens
  // tokens. Requires !busy().
  void Enqueue(int table_row, int blocks, std::shared_ptr<const std::vector<SlotPair>> pairs,
               int first_position, absl::Span<const int32_t> tokens, std::function<void()> done);
  [[nodiscard]] bool busy() const { return busy_; }

 private:
  PromptChunk(const Transformer& transformer, KvCache& cache, TaskQueue& queue);

  const Transformer& transformer_;
  KvCache& cache_;
  TaskQueue& queue_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Stream> stream_;
  std::shared_ptr<const std::vector<SlotPair>> table_;  // of the chunk in flight
  bool busy_ = false;
};

}  // namespace kvt
