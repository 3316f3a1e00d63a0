#include "decode_worker/offload/offload_shape.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/base/limits.h"
#include "kernels/select/attention_stats.h"
#include "kernels/select/hot_set.h"

namespace kvt {
namespace {

// Sinks and the most blocks that hold one of the last 128 tokens.
constexpr int kFixedBlocks = kSinkTokens / kBlockTokens + kRecentTokens / kBlockTokens + 1;

// Hot slots of the selecting layers, each at least `selected`, `total` in all.
std::vector<int> Divide(const std::vector<const CalibrationLayer*>& layers, int selected, int total) {
  const int least = layers[0]->miss_least;
  const int step = layers[0]->miss_step;
  std::vector<MissCurve> curves;
  for (const CalibrationLayer* layer : layers) {
    if (layer->misses.empty() || layer->miss_least != least || layer->miss_step != step) break;
    curves.push_back({layer->misses});
  }
  const auto count = static_cast<int>(layers.size());
  if (curves.size() < layers.size() || least <= 0) return std::vector<int>(layers.size(), total / count);
  // The curves are of another selection: a capacity counts in multiples of it.
  const int own_step =
      std::max(1, static_cast<int>(std::lround(static_cast<double>(step) * selected / least)));
  return DivideSlots(curves, selected, own_step, total);
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
  const int selected =
      std::clamp((budget.tokens - kSinkTokens - kRecentTokens) / kBlockTokens, 0, middle);
  shape.selected_max = selected;
  shape.middle_max = middle;
  std::vector<const CalibrationLayer*> selecting;
  for (const CalibrationLayer& layer : calibration.layers) {
    shape.dense.push_back(layer.heads.empty());
    if (!layer.heads.empty()) selecting.push_back(&layer);
  }
  shape.hot_slots.assign(shape.dense.size(), 0);
  if (selecting.empty() || selected == 0) return shape;
  const int each = std::min(middle, static_cast<int>(std::lround(selected * budget.hot_factor)));
  std::vector<int> hot = Divide(selecting, selected, each * static_cast<int>(selecting.size()));
  size_t next = 0;
  for (size_t l = 0; l < shape.dense.size(); ++l) {
    // More than every middle block is of no use.
    if (!shape.dense[l]) shape.hot_slots[l] = std::clamp(hot[next++], selected, middle);
  }
  return shape;
}

int FetchesMax(const OffloadBudget& budget, int blocks) {
  return std::max(1, static_cast<int>(std::ceil(budget.fetch_share * blocks)));
}

}  // namespace kvt
