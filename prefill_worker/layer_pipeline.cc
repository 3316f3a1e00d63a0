#include "prefill_worker/layer_pipeline.h"

#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<LayerPipeline>> LayerPipeline::Create(
    const Transformer& transformer, KvCache& cache, TaskQueue& queue, int rows, int segments,
    FirstSelector* selector, PipelineHandlers handlers) {
  std::unique_ptr<LayerPipeline> pipeline(
      new LayerPipeline(transformer, cache, queue, selector, std::move(handlers)));
  KVT_ASSIGN_OR_RETURN(pipeline->state_, transformer.NewStepState({.rows = rows,
                                                                   .logits_rows = segments,
                                                                   .segments = segments}));
  KVT_ASSIGN_OR_RETURN(pipeline->mailbox_,
                       transformer.device().NewMailbox(1, StepResultBytes(segments)));
  pipeline->stream_ = transformer.device().NewStream(StreamPriority::kNormal);
  return pipeline;
}

LayerPipeline::LayerPipeline(const Transformer& transformer, KvCache& cache, TaskQueue& queue,
                             FirstSelector* selector, PipelineHandlers handlers)
    : transformer_(transformer),
      cache_(cache),
      queue_(queue),
      selector_(selector),
      handlers_(std::move(handlers)),
      times_(static_cast<size_t>(transformer.geometry().layers)) {}

LayerPipeline::~LayerPipeline() { stream_.reset(); }

void LayerPipeline::SetTable(int row, int blocks,
                             std::shared_ptr<const std::vector<SlotPair>> pairs) {
  cache_.SetTableAllLayers(*stream_, row, 0, blocks, *pairs);
  tables_.push_back(std::move(pairs));
}

void LayerPipeline::Enqueue(uint64_t step, absl::Span<const PipelineSegment> segments) {
  KVT_CHECK(!busy_, "step=", step);
  busy_ = true;
  step_tables_ = std::exchange(tables_, {});
  std::vector<StepSegment> parts;
  std::vector<SampleParams> sampled;
  std::vector<SelectionRow> selecting;
  int rows = 0;
  for (const PipelineSegment& segment : segments) {
    parts.push_back({.table_row = segment.table_row,
                     .first_position = segment.first_position,
                     .tokens = segment.tokens,
                     .logits_rows = segment.sample.has_value() ? 1 : 0});
    if (segment.sample.has_value()) sampled.push_back(*segment.sample);
    rows += static_cast<int>(segment.tokens.size());
    if (segment.selection != nullptr) {
      selecting.push_back({segment.table_row, rows - 1, segment.selection});
    }
  }
  Stream& stream = *stream_;
  stream.Callback([this] { times_[0].began = RealClock::Get().Now(); });
  transformer_.Begin(stream, *state_, cache_, parts);
  const int layers = transformer_.geometry().layers;
  for (int layer = 0; layer < layers; ++layer) {
    transformer_.ProjectQkv(stream, *state_, layer);
    stream.Callback([this, step, layer] {
      times_[static_cast<size_t>(layer)].written = RealClock::Get().Now();
      queue_.Post([this, step, layer] { handlers_.layer_written(step, layer); });
    });
    if (!selecting.empty()) {
      selector_->Enqueue(stream, cache_, layer, transformer_.Activations(*state_), selecting);
    }
    transformer_.Attend(stream, *state_, layer);
    transformer_.FinishLayer(stream, *state_, layer);
    stream.Callback([this, layer, layers] {
      const absl::Time now = RealClock::Get().Now();
      times_[static_cast<size_t>(layer)].ended = now;
      if (layer + 1 < layers) times_[static_cast<size_t>(layer) + 1].began = now;
    });
  }
  if (!sampled.empty()) {
    transformer_.Logits(stream, *state_);
    transformer_.Sample(stream, *state_, sampled, *mailbox_, 0, step);
  }
  const int count = static_cast<int>(sampled.size());
  stream.Callback([this, step, count] { queue_.Post([this, step, count] { Done(step, count); }); });
}

void LayerPipeline::Done(uint64_t step, int sampled) {
  PipelineResult result{.step = step, .tokens = {}, .saturated = 0};
  if (sampled > 0) {
    KVT_CHECK(mailbox_->Tag(0) == step, "tag=", mailbox_->Tag(0), " step=", step);
    const auto* payload = static_cast<const StepResult*>(mailbox_->HostPayload(0));
    KVT_CHECK(payload->logits_rows == static_cast<uint32_t>(sampled));
    result.tokens.assign(payload->tokens, payload->tokens + sampled);
    result.saturated = payload->kv_saturated;
  }
  busy_ = false;
  step_tables_.clear();
  if (selector_ != nullptr) selector_->Reset();
  handlers_.step_done(result);
}

}  // namespace kvt
