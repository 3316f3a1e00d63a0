#include "decode_worker/offload/offload_shape.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/base/check.h"
#include "kernels/base/limits.h"
#include "kernels/select/attention_stats.h"
#include "kernels/select/hot_set.h"
#include "kernels/select/layer_budgets.h"

namespace kvt {
namespace {

// Sinks and the most blocks that hold one of the last 128 tokens.
constexpr int kFixedBlocks = kSinkTokens / kBlockTokens + kRecentTokens / kBlockTokens + 1;

// Digests that the tier lacks are made from that many blocks at once.
constexpr int kHotSlotsLeast = 8;

// Hot slots of the selecting layers, of which layer i needs `least[i]` and would have `each[i]`.
std::vector<int> Divide(const std::vector<const CalibrationLayer*>& layers,
                        const std::vector<int>& least, const std::vector<int>& each) {
  std::vector<MissCurve> curves;
  for (size_t i = 0; i < layers.size(); ++i) {
    const CalibrationLayer& layer = *layers[i];
    if (layer.misses.empty() || layer.miss_least <= 0) return each;
    // The curve is of another selection: a capacity counts in multiples of it.
    const double step = static_cast<double>(layer.miss_step) * least[i] / layer.miss_least;
    curves.push_back({least[i], std::max(1, static_cast<int>(std::lround(step))), layer.misses});
  }
  return DivideSlots(curves, std::accumulate(each.begin(), each.end(), 0));
}

}  // namespace

int OffloadedShape::dense_layers() const {
  return static_cast<int>(std::count(dense.begin(), dense.end(), true));
}

uint64_t OffloadedShape::Slots() const {
  const int of_dense = dense_layers() * blocks_max;
  int pairs = of_dense + (layers() - dense_layers()) * whole_max;
  for (const int hot : hot_slots) pairs += hot;
  return 2 * static_cast<uint64_t>(pairs);
}

OffloadedShape ShapeFor(const Calibration& calibration, const OffloadBudget& budget, int blocks_max) {
  KVT_CHECK(blocks_max > 0 && budget.hot_factor >= 1, "blocks_max=", blocks_max);
  OffloadedShape shape;
  shape.blocks_max = blocks_max;
  shape.whole_max = std::min(blocks_max, kFixedBlocks + kOffloadedLagBlocks);
  const int middle = MiddleOf(blocks_max * kBlockTokens - 1).count();
  shape.middle_max = middle;
  shape.selected_mean = std::min(BudgetBlocks(budget.tokens), middle);
  shape.budgets = LayerBudgets(calibration, budget.tokens, middle);
  std::vector<const CalibrationLayer*> selecting;
  std::vector<int> least, each;
  for (size_t l = 0; l < calibration.layers.size(); ++l) {
    const CalibrationLayer& layer = calibration.layers[l];
    shape.dense.push_back(layer.heads.empty());
    shape.selected.push_back(shape.dense[l] ? 0 : std::min(BudgetBlocks(shape.budgets[l]), middle));
    if (shape.dense[l]) continue;
    selecting.push_back(&layer);
    const int hot = static_cast<int>(std::lround(shape.selected[l] * budget.hot_factor));
    least.push_back(std::min(std::max(shape.selected[l], kHotSlotsLeast), middle));
    each.push_back(std::min(std::max(hot, least.back()), middle));
  }
  shape.hot_slots.assign(shape.dense.size(), 0);
  if (selecting.empty() || shape.selected_mean == 0) return shape;
  const std::vector<int> hot = Divide(selecting, least, each);
  size_t next = 0;
  for (size_t l = 0; l < shape.dense.size(); ++l) {
    // More than every middle block is of no use.
    if (!shape.dense[l]) shape.hot_slots[l] = std::min(hot[next++], middle);
  }
  return shape;
}

int FetchesMax(const OffloadBudget& budget, int blocks) {
  return std::max(1, static_cast<int>(std::ceil(budget.fetch_share * blocks)));
}

}  // namespace kvt
