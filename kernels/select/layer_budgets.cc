#include "kernels/select/layer_budgets.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "kernels/base/check.h"
#include "kernels/select/attention_stats.h"

namespace kvt {
namespace {

constexpr int kBlocksLeast = 2;
// A layer gets at most so many times the mean.
constexpr int kTimesMean = 8;
// Below this, what rounding of the products leaves: no gain is real.
constexpr double kLossFloor = 1e-5;
// Beyond the last measured size a loss falls at least as fast as the selection grows.
constexpr double kTailSlope = -1;
// Where a curve is looked at: at every size first, then at every eighth.
int NextSize(int size) { return std::max(size + 1, size * 9 / 8); }

// Loss with `blocks` selected: between and beyond the measured sizes straight in log and log.
double Loss(const std::vector<double>& losses, int blocks) {
  const size_t last = std::size(kLossBlocks) - 1;
  size_t i = 0;
  while (i + 1 < last && blocks > kLossBlocks[i + 1]) ++i;
  const auto log_of = [&](size_t at) { return std::log(std::max(losses[at], kLossFloor)); };
  double slope = std::min(0.0, (log_of(i + 1) - log_of(i)) /
                                   std::log(static_cast<double>(kLossBlocks[i + 1]) / kLossBlocks[i]));
  if (blocks > kLossBlocks[last]) {
    i = last;
    slope = std::min(slope, kTailSlope);
  }
  return std::exp(log_of(i) + slope * std::log(static_cast<double>(blocks) / kLossBlocks[i]));
}

struct Point {
  int blocks;
  double loss;
};
// Part of a curve's lower hull: gain per block falls from one to the next.
struct Part {
  double gain;  // per block
  size_t layer;
  int blocks;
};

void AddHull(const std::vector<double>& losses, size_t layer, int most, std::vector<Part>* parts) {
  std::vector<Point> hull;
  const auto add = [&](int blocks) {
    const Point point{blocks, Loss(losses, blocks)};
    while (hull.size() >= 2) {
      const Point& a = hull[hull.size() - 2];
      const Point& b = hull.back();
      if ((b.loss - a.loss) * (point.blocks - a.blocks) < (point.loss - a.loss) * (b.blocks - a.blocks)) {
        break;
      }
      hull.pop_back();
    }
    hull.push_back(point);
  };
  for (int size = kBlocksLeast; size < most; size = NextSize(size)) add(size);
  add(most);
  for (size_t i = 1; i < hull.size(); ++i) {
    const int blocks = hull[i].blocks - hull[i - 1].blocks;
    parts->push_back({(hull[i - 1].loss - hull[i].loss) / blocks, layer, blocks});
  }
}

}  // namespace

int BudgetBlocks(int budget_tokens) {
  return std::max(0, (budget_tokens - kSinkTokens - kRecentTokens) / kBlockTokens);
}

std::vector<int> LayerBudgets(const Calibration& calibration, int budget_tokens, int middle_blocks) {
  const int mean = BudgetBlocks(budget_tokens);
  std::vector<int> budgets;
  bool divides = mean > kBlocksLeast && mean < middle_blocks;
  int selecting = 0;
  for (const CalibrationLayer& layer : calibration.layers) {
    const bool dense = layer.heads.empty();
    budgets.push_back(dense ? 0 : budget_tokens);
    selecting += !dense;
    divides = divides && (dense || !layer.losses.empty());
  }
  if (!divides || selecting == 0) return budgets;
  const int most = std::min(middle_blocks, kTimesMean * mean);
  std::vector<Part> parts;
  for (size_t l = 0; l < budgets.size(); ++l) {
    if (budgets[l] > 0) AddHull(calibration.layers[l].losses, l, most, &parts);
  }
  // The greatest gains first; a curve's own come in order, for they fall along its hull.
  std::stable_sort(parts.begin(), parts.end(),
                   [](const Part& a, const Part& b) { return a.gain > b.gain; });
  int left = (mean - kBlocksLeast) * selecting;
  std::vector<int> blocks(budgets.size(), kBlocksLeast);
  for (const Part& part : parts) {
    const int taken = std::min(part.blocks, left);
    blocks[part.layer] += taken;
    left -= taken;
  }
  KVT_CHECK(left == 0, "left=", left);
  for (size_t l = 0; l < budgets.size(); ++l) {
    if (budgets[l] > 0) budgets[l] += kBlockTokens * (blocks[l] - mean);
  }
  return budgets;
}

}  // namespace kvt
