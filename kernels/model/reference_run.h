// One model in one process, without a tier: a prompt in chunks, then one token at a time. The
// reference that identity tests compare the cluster with; `kvtide-run` is its command line.
// Owner: a tool or a test. Not thread-safe. It waits on the device, with deadlines.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"

namespace kvt {

struct ReferenceRequest {
  absl::Span<const int32_t> prompt;
  int max_tokens = 128;  // of the answer; > 0
  SampleParams sampling;  // position is set by the run
  // Generation stops after one of these (it is part of the answer's tokens). Usually
  // ModelConfig::eos_ids.
  std::vector<int32_t> stop_ids;
};

struct ReferenceResult {
  std::vector<int32_t> tokens;
  bool stopped = false;  // by a stop id; else by max_tokens or the end of the context
  absl::Duration time_to_first_token;
  absl::Duration total;
};

class ReferenceRun {
 public:
  struct Options {
    int chunk_tokens = 512;  // [1, kPrefillChunkTokensMax]
    // No step takes longer; else DeadlineExceeded.
    absl::Duration step_timeout = absl::Seconds(120);
  };
  // InvalidArgument, ResourceExhausted. `transformer` outlives the result.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<ReferenceRun>> Create(
      const Transformer& transformer, const Options& options);

  // `on_token`, when set, hears each token as it comes. InvalidArgument: empty prompt, a token
  // outside the vocabulary, bad sampling parameters. OutOfRange: the prompt leaves no room in the
  // model's context. DataLoss: the model computed a NaN.
  [[nodiscard]] absl::StatusOr<ReferenceResult> Generate(
      const ReferenceRequest& request, const std::function<void(int32_t)>& on_token = nullptr);

  // Logits [tokens.size()][vocab] of every position of `tokens`, for tests of the model.
  [[nodiscard]] absl::StatusOr<std::vector<float>> AllLogits(absl::Span<const int32_t> tokens);

 private:
  ReferenceRun(const Transformer& transformer, const Options& options);
  absl::Status CheckRequest(const ReferenceRequest& request) const;
  // A cache of one sequence with a full table for `tokens` tokens.
  absl::StatusOr<std::unique_ptr<KvCache>> NewCache(int tokens);
  void EnqueueStep(KvCache& cache, absl::Span<const int32_t> tokens, int first_position,
                   int logits_rows);
  absl::StatusOr<int32_t> SampleNext(const SampleParams& params);

  const Transformer& transformer_;
  const Options options_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<Event> event_;
  uint64_t tag_ = 0;
};

}  // namespace kvt
