#include "prefill_worker/first_selection.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/model/model_config.h"
#include "kernels/select/layer_budgets.h"

namespace kvt {

void FirstSelection::Finish() {
  const int first = MiddleOf(position).first;
  for (std::vector<int32_t>& layer : selected) {
    for (int32_t& block : layer) block += first;
  }
}

absl::StatusOr<std::unique_ptr<FirstSelector>> FirstSelector::Create(
    const Transformer& transformer, const Calibration& calibration, int blocks_max,
    int budget_tokens) {
  std::unique_ptr<FirstSelector> selector(
      new FirstSelector(transformer, calibration, blocks_max, budget_tokens));
  Device& device = transformer.device();
  const auto blocks = static_cast<size_t>(blocks_max);
  KVT_ASSIGN_OR_RETURN(selector->heads_, DigestHeads::Create(device, calibration));
  const std::vector<uint32_t> bytes = calibration.DigestBytesByLayer();
  const size_t layer_bytes = *std::max_element(bytes.begin(), bytes.end());
  KVT_ASSIGN_OR_RETURN(selector->digests_, device.Allocate(std::max<size_t>(blocks * layer_bytes, 64)));
  KVT_ASSIGN_OR_RETURN(selector->scores_, device.Allocate(blocks * sizeof(float)));
  KVT_ASSIGN_OR_RETURN(selector->selected_, device.Allocate(blocks * sizeof(int32_t)));
  const int queries = selector->heads_->heads_max() * transformer.config().GroupSize();
  KVT_ASSIGN_OR_RETURN(
      selector->workspace_,
      device.Allocate(std::max(device.ops().ScoreWorkspaceBytes(queries, 1, blocks_max),
                               device.ops().SelectWorkspaceBytes(1, blocks_max))));
  return selector;
}

std::shared_ptr<FirstSelection> FirstSelector::New(int tokens) const {
  auto selection = std::make_shared<FirstSelection>();
  selection->position = tokens - 1;
  selection->blocks = tokens / kBlockTokens;
  const auto layers = static_cast<size_t>(heads_->layers());
  selection->digests.resize(layers);
  selection->selected.resize(layers);
  const std::vector<int> budgets =
      LayerBudgets(calibration_, budget_tokens_, MiddleOf(selection->position).count());
  for (int layer = 0; layer < heads_->layers(); ++layer) {
    if (heads_->dense(layer)) continue;
    const auto l = static_cast<size_t>(layer);
    const size_t bytes = heads_->Spec(layer).Bytes(transformer_.geometry().head_dim);
    selection->digests[l].resize(static_cast<size_t>(selection->blocks) * bytes);
    selection->selected[l].resize(
        static_cast<size_t>(SelectedBlocks(budgets[l], selection->position)));
  }
  return selection;
}

void FirstSelector::Enqueue(Stream& stream, const KvCache& cache, int layer,
                            const LayerActivations& activations,
                            absl::Span<const SelectionRow> rows) {
  if (heads_->dense(layer)) return;
  for (const SelectionRow& row : rows) {
    FirstSelection& selection = *row.selection;
    if (selection.blocks == 0) continue;
    KVT_CHECK(selection.blocks <= blocks_max_, "blocks=", selection.blocks);
    MakeDigestArgs digest;
    digest.geometry = transformer_.geometry();
    digest.spec = heads_->Spec(layer);
    digest.slots = cache.slots();
    digest.blocks = cache.Table(row.table_row, layer);
    digest.count = selection.blocks;
    digest.digests = digests_.as<uint8_t>();
    transformer_.device().ops().MakeDigest(stream, digest);
    std::vector<uint8_t>& host = selection.digests[static_cast<size_t>(layer)];
    stream.CopyToHost(host.data(), digests_.data(), host.size());
    Select(stream, layer, activations, row);
  }
}

void FirstSelector::Select(Stream& stream, int layer, const LayerActivations& activations,
                           const SelectionRow& row) {
  std::vector<int32_t>& chosen = row.selection->selected[static_cast<size_t>(layer)];
  if (chosen.empty()) return;
  const MiddleBlocks middle = MiddleOf(row.selection->position);
  score_segments_.push_back({nullptr, static_cast<uint32_t>(middle.first), middle.count(), row.row,
                             scores_.as<float>()});
  ScoreBlocksArgs score;
  score.geometry = transformer_.geometry();
  score.spec = heads_->Spec(layer);
  score.query_heads = transformer_.config().heads;
  score.scale = 1.0f / std::sqrt(static_cast<float>(score.geometry.head_dim));
  score.q = activations.qkv;
  score.q_stride = activations.qkv_stride;
  score.digests = digests_.as<uint8_t>();
  score.segments = absl::MakeConstSpan(&score_segments_.back(), 1);
  Ops& ops = transformer_.device().ops();
  ops.ScoreBlocks(stream, score, workspace_.data(), workspace_.bytes());
  select_segments_.push_back({scores_.as<float>(), middle.count(),
                              static_cast<int>(chosen.size()), selected_.as<int32_t>()});
  ops.SelectTopBlocks(stream, {absl::MakeConstSpan(&select_segments_.back(), 1), blocks_max_},
                      workspace_.data(), workspace_.bytes());
  stream.CopyToHost(chosen.data(), selected_.data(), chosen.size() * sizeof(int32_t));
}

void FirstSelector::Reset() {
  score_segments_.clear();
  select_segments_.clear();
}

}  // namespace kvt
