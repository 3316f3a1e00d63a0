// A model on a CPU device of its own, for tests that look at logits: feeds a sequence in chunks of
// a chosen size through the steps of kernels/model/transformer.h. Not thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"

namespace kvt {

class LogitsRunner {
 public:
  // For sequences of up to `tokens_max`.
  static absl::StatusOr<std::unique_ptr<LogitsRunner>> Create(const std::string& folder,
                                                              TransformerOptions::Compute compute,
                                                              int tokens_max);

  // Runs the sequence from position 0 and calls `row` with the logits [vocab] of every position, in
  // order. DeadlineExceeded when a chunk takes a minute.
  absl::Status Run(absl::Span<const int32_t> tokens, int chunk,
                   const std::function<void(int position, absl::Span<const float> logits)>& row);

  [[nodiscard]] const Transformer& model() const { return *model_; }

 private:
  static constexpr int kChunkMax = 256;

  LogitsRunner() = default;

  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
  std::vector<float> logits_;
};

}  // namespace kvt
