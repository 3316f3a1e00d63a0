#include "kernels/model/reference_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/units.h"
#include "kernels/model/model_config.h"

namespace kvt {

ReferenceRun::ReferenceRun(const Transformer& transformer, const Options& options)
    : transformer_(transformer),
      options_(options),
      stream_(transformer.device().NewStream(StreamPriority::kNormal)),
      event_(transformer.device().NewEvent()) {}

absl::StatusOr<std::unique_ptr<ReferenceRun>> ReferenceRun::Create(const Transformer& transformer,
                                                                   const Options& options) {
  if (options.chunk_tokens < 1 || options.chunk_tokens > kPrefillChunkTokensMax) {
    return absl::InvalidArgumentError(absl::StrCat("chunk: ", options.chunk_tokens,
                                                   " is not in [1, ", kPrefillChunkTokensMax, "]"));
  }
  auto run = std::unique_ptr<ReferenceRun>(new ReferenceRun(transformer, options));
  KVT_ASSIGN_OR_RETURN(run->state_, transformer.NewStepState({.rows = options.chunk_tokens,
                                                              .logits_rows = 1,
                                                              .segments = 1}));
  KVT_ASSIGN_OR_RETURN(run->mailbox_,
                       transformer.device().NewMailbox(1, StepResultBytes(1)));
  return run;
}

absl::Status ReferenceRun::CheckRequest(const ReferenceRequest& request) const {
  const ModelConfig& config = transformer_.config();
  if (request.prompt.empty()) return absl::InvalidArgumentError("the prompt is empty");
  if (static_cast<int64_t>(request.prompt.size()) >= config.context_tokens) {
    return absl::OutOfRangeError(absl::StrCat("the prompt has ", request.prompt.size(),
                                              " tokens; the model's context of ",
                                              config.context_tokens,
                                              " leaves no room for an answer"));
  }
  for (const int32_t token : request.prompt) {
    if (token < 0 || token >= config.vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", token, " is not in the vocabulary of ", config.vocab));
    }
  }
  if (request.max_tokens < 1) {
    return absl::InvalidArgumentError(absl::StrCat("max_tokens: ", request.max_tokens));
  }
  return request.sampling.Validate();
}

absl::StatusOr<std::unique_ptr<KvCache>> ReferenceRun::NewCache(int tokens) {
  const Geometry& geometry = transformer_.geometry();
  const int blocks = static_cast<int>(CeilDiv(static_cast<uint64_t>(tokens), kBlockTokens));
  const uint32_t slots = 2u * static_cast<uint32_t>(geometry.layers * blocks);
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<KvCache> cache,
                       KvCache::Create(transformer_.device(), geometry,
                                       {.slot_count = slots, .table_rows = 1,
                                        .blocks_per_row = blocks}));
  std::vector<SlotPair> pairs(slots / 2);
  for (uint32_t i = 0; i < slots / 2; ++i) pairs[i] = {2 * i, 2 * i + 1};
  cache->SetTableAllLayers(*stream_, 0, 0, blocks, pairs);
  return cache;
}

void ReferenceRun::EnqueueStep(KvCache& cache, absl::Span<const int32_t> tokens,
                               int first_position, int logits_rows) {
  const StepSegment segment{0, first_position, tokens, logits_rows};
  transformer_.Begin(*stream_, *state_, cache, {&segment, 1});
  for (int layer = 0; layer < transformer_.geometry().layers; ++layer) {
    transformer_.ProjectQkv(*stream_, *state_, layer);
    transformer_.Attend(*stream_, *state_, layer);
    transformer_.FinishLayer(*stream_, *state_, layer);
  }
  if (logits_rows > 0) transformer_.Logits(*stream_, *state_);
}

absl::StatusOr<int32_t> ReferenceRun::SampleNext(const SampleParams& params) {
  transformer_.Sample(*stream_, *state_, {&params, 1}, *mailbox_, 0, ++tag_);
  if (!mailbox_->WaitTag(0, tag_, options_.step_timeout)) {
    return absl::DeadlineExceededError(absl::StrCat("a step took longer than ",
                                                    absl::FormatDuration(options_.step_timeout)));
  }
  const int32_t token = static_cast<const StepResult*>(mailbox_->HostPayload(0))->tokens[0];
  if (token == kTokenInvalid) return absl::DataLossError("the model computed a NaN");
  return token;
}

absl::StatusOr<ReferenceResult> ReferenceRun::Generate(
    const ReferenceRequest& request, const std::function<void(int32_t)>& on_token) {
  KVT_RETURN_IF_ERROR(CheckRequest(request));
  const int prompt = static_cast<int>(request.prompt.size());
  const int room = transformer_.config().context_tokens - prompt;
  const int max_tokens = std::min(request.max_tokens, room);
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<KvCache> cache, NewCache(prompt + max_tokens));
  const absl::Time start = RealClock::Get().Now();
  for (int at = 0; at < prompt; at += options_.chunk_tokens) {
    const int count = std::min(options_.chunk_tokens, prompt - at);
    EnqueueStep(*cache, request.prompt.subspan(static_cast<size_t>(at), static_cast<size_t>(count)),
                at, at + count == prompt ? 1 : 0);
    // A step state holds one step in flight.
    stream_->Record(*event_);
    if (!event_->HostWait(options_.step_timeout)) {
      return absl::DeadlineExceededError(absl::StrCat("a step took longer than ",
                                                      absl::FormatDuration(options_.step_timeout)));
    }
  }
  ReferenceResult result;
  SampleParams params = request.sampling;
  for (int position = prompt;; ++position) {
    params.position = static_cast<uint64_t>(position);
    KVT_ASSIGN_OR_RETURN(const int32_t token, SampleNext(params));
    result.tokens.push_back(token);
    result.total = RealClock::Get().Now() - start;
    if (result.tokens.size() == 1) result.time_to_first_token = result.total;
    if (on_token != nullptr) on_token(token);
    result.stopped = std::find(request.stop_ids.begin(), request.stop_ids.end(), token) !=
                     request.stop_ids.end();
    if (result.stopped || static_cast<int>(result.tokens.size()) == max_tokens) return result;
    EnqueueStep(*cache, {&token, 1}, position, 1);
  }
}

absl::StatusOr<std::vector<float>> ReferenceRun::AllLogits(absl::Span<const int32_t> tokens) {
  ReferenceRequest request;
  request.prompt = tokens;
  KVT_RETURN_IF_ERROR(CheckRequest(request));
  const int count = static_cast<int>(tokens.size());
  const size_t vocab = static_cast<size_t>(transformer_.config().vocab);
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<KvCache> cache, NewCache(count));
  KVT_ASSIGN_OR_RETURN(
      const std::unique_ptr<StepState> state,
      transformer_.NewStepState({.rows = options_.chunk_tokens,
                                 .logits_rows = options_.chunk_tokens, .segments = 1}));
  std::vector<float> logits(static_cast<size_t>(count) * vocab);
  for (int at = 0; at < count; at += options_.chunk_tokens) {
    const int n = std::min(options_.chunk_tokens, count - at);
    const StepSegment segment{
        0, at, tokens.subspan(static_cast<size_t>(at), static_cast<size_t>(n)), n};
    transformer_.Begin(*stream_, *state, *cache, {&segment, 1});
    for (int layer = 0; layer < transformer_.geometry().layers; ++layer) {
      transformer_.ProjectQkv(*stream_, *state, layer);
      transformer_.Attend(*stream_, *state, layer);
      transformer_.FinishLayer(*stream_, *state, layer);
    }
    transformer_.Logits(*stream_, *state);
    transformer_.ReadLogits(*stream_, *state, logits.data() + static_cast<size_t>(at) * vocab);
    stream_->Record(*event_);
    if (!event_->HostWait(options_.step_timeout)) {
      return absl::DeadlineExceededError("a step took too long");
    }
  }
  return logits;
}

}  // namespace kvt
