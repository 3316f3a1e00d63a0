#include "decode_worker/engine/decode_step.h"

#include <utility>

#include "kernels/base/check.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<DecodeStep>> DecodeStep::Create(
    const Transformer& transformer, KvCache& cache, TaskQueue& queue, int rows,
    std::function<void(const DecodeStepResult&)> step_done) {
  std::unique_ptr<DecodeStep> step(
      new DecodeStep(transformer, cache, queue, std::move(step_done)));
  KVT_ASSIGN_OR_RETURN(step->state_, transformer.NewStepState(
                                         {.rows = rows, .logits_rows = rows, .segments = rows}));
  KVT_ASSIGN_OR_RETURN(step->mailbox_,
                       transformer.device().NewMailbox(1, StepResultBytes(rows)));
  step->stream_ = transformer.device().NewStream(StreamPriority::kNormal);
  return step;
}

DecodeStep::DecodeStep(const Transformer& transformer, KvCache& cache, TaskQueue& queue,
                       std::function<void(const DecodeStepResult&)> step_done)
    : transformer_(transformer),
      cache_(cache),
      queue_(queue),
      step_done_(std::move(step_done)) {}

DecodeStep::~DecodeStep() { stream_.reset(); }

void DecodeStep::SetTable(int row, int blocks, std::shared_ptr<const std::vector<SlotPair>> pairs) {
  cache_.SetTableAllLayers(*stream_, row, 0, blocks, *pairs);
  tables_.push_back(std::move(pairs));
}

void DecodeStep::Enqueue(uint64_t step, absl::Span<const DecodeRow> rows) {
  KVT_CHECK(!busy_ && !rows.empty(), "step=", step);
  busy_ = true;
  step_tables_ = std::exchange(tables_, {});
  std::vector<StepSegment> segments;
  std::vector<SampleParams> samples;
  for (const DecodeRow& row : rows) {
    segments.push_back({.table_row = row.table_row,
                        .first_position = row.position,
                        .tokens = absl::MakeConstSpan(&row.token, 1),
                        .logits_rows = 1});
    samples.push_back(row.sample);
  }
  Stream& stream = *stream_;
  transformer_.Begin(stream, *state_, cache_, segments);
  for (int layer = 0; layer < transformer_.geometry().layers; ++layer) {
    transformer_.ProjectQkv(stream, *state_, layer);
    transformer_.Attend(stream, *state_, layer);
    transformer_.FinishLayer(stream, *state_, layer);
  }
  transformer_.Logits(stream, *state_);
  transformer_.Sample(stream, *state_, samples, *mailbox_, 0, step);
  const size_t count = rows.size();
  stream.Callback([this, step, count] { queue_.Post([this, step, count] { Done(step, count); }); });
}

void DecodeStep::Done(uint64_t step, size_t rows) {
  KVT_CHECK(mailbox_->Tag(0) == step, "tag=", mailbox_->Tag(0), " step=", step);
  const auto* payload = static_cast<const StepResult*>(mailbox_->HostPayload(0));
  KVT_CHECK(payload->logits_rows == rows);
  DecodeStepResult result;
  result.step = step;
  result.tokens.assign(payload->tokens, payload->tokens + rows);
  result.saturated = payload->kv_saturated;
  busy_ = false;
  step_tables_.clear();
  step_done_(result);
}

}  // namespace kvt
