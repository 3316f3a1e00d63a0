#include "tests/support/logits_runner.h"

#include <algorithm>

#include "absl/time/time.h"
#include "kernels/base/check.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/model_config.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<LogitsRunner>> LogitsRunner::Create(
    const std::string& folder, TransformerOptions::Compute compute, int tokens_max) {
  std::unique_ptr<LogitsRunner> runner(new LogitsRunner());
  KVT_ASSIGN_OR_RETURN(runner->device_, MakeCpuDevice({}));
  Device& device = *runner->device_;
  KVT_ASSIGN_OR_RETURN(runner->model_, Transformer::Load(folder, device, {.compute = compute}));
  const Geometry& geometry = runner->model_->geometry();
  const int blocks = (tokens_max + kBlockTokens - 1) / kBlockTokens;
  const auto slots = static_cast<uint32_t>(2 * geometry.layers * blocks);
  KVT_ASSIGN_OR_RETURN(
      runner->cache_,
      KvCache::Create(device, geometry,
                      {.slot_count = slots, .table_rows = 1, .blocks_per_row = blocks}));
  runner->stream_ = device.NewStream(StreamPriority::kNormal);
  runner->done_ = device.NewEvent();
  std::vector<SlotPair> pairs;
  for (uint32_t slot = 0; slot < slots; slot += 2) pairs.push_back({slot, slot + 1});
  runner->cache_->SetTableAllLayers(*runner->stream_, 0, 0, blocks, pairs);
  KVT_ASSIGN_OR_RETURN(
      runner->state_,
      runner->model_->NewStepState({.rows = kChunkMax, .logits_rows = kChunkMax, .segments = 1}));
  return runner;
}

absl::Status LogitsRunner::Run(
    absl::Span<const int32_t> tokens, int chunk,
    const std::function<void(int position, absl::Span<const float> logits)>& row) {
  KVT_CHECK(chunk > 0 && chunk <= kChunkMax, chunk);
  const size_t vocab = model_->config().vocab;
  logits_.resize(vocab * chunk);
  for (size_t begin = 0; begin < tokens.size(); begin += chunk) {
    const auto part = tokens.subspan(begin, chunk);
    const auto rows = static_cast<int>(part.size());
    const StepSegment segment = {.table_row = 0,
                                 .first_position = static_cast<int>(begin),
                                 .tokens = part,
                                 .logits_rows = rows};
    model_->Begin(*stream_, *state_, *cache_, {segment});
    for (int layer = 0; layer < model_->geometry().layers; ++layer) {
      model_->ProjectQkv(*stream_, *state_, layer);
      model_->Attend(*stream_, *state_, layer);
      model_->FinishLayer(*stream_, *state_, layer);
    }
    model_->Logits(*stream_, *state_);
    model_->ReadLogits(*stream_, *state_, logits_.data());
    stream_->Record(*done_);
    if (!done_->HostWait(absl::Minutes(1))) {
      return absl::DeadlineExceededError("a chunk took more than a minute");
    }
    KVT_RETURN_IF_ERROR(device_->Health());
    for (int i = 0; i < rows; ++i) {
      row(static_cast<int>(begin) + i, absl::MakeConstSpan(logits_).subspan(i * vocab, vocab));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvt
