#include "kernels/select/layer_budgets.h"

#include <gtest/gtest.h>

#include <numeric>

#include "kernels/base/random.h"
#include "kernels/select/attention_stats.h"

namespace kvt {
namespace {

constexpr int kFixed = kSinkTokens + kRecentTokens;
constexpr int kMiddle = 450;

Calibration WithLosses(const std::vector<std::vector<double>>& losses) {
  Calibration c;
  c.layers.resize(losses.size());
  for (size_t l = 0; l < losses.size(); ++l) {
    c.layers[l].heads.resize(1);
    c.layers[l].losses = losses[l];
  }
  return c;
}
int Blocks(const std::vector<int>& budgets) {
  int blocks = 0;
  for (const int tokens : budgets) blocks += BudgetBlocks(tokens);
  return blocks;
}

TEST(LayerBudgets, LayersThatLoseMore_GetMoreAndTheMeanStays) {
  const Calibration c = WithLosses({{0.04, 0.01, 0.0025}, {0.004, 0.001, 0.00025}, {0.0004, 0.0001, 0.00005}});
  for (const int mean : {3, 7, 22, 54, 118}) {
    const std::vector<int> budgets = LayerBudgets(c, kFixed + 16 * mean + 5, kMiddle);
    EXPECT_GT(budgets[0], budgets[1]) << mean;
    EXPECT_GE(budgets[1], budgets[2]) << mean;
    EXPECT_EQ(Blocks(budgets), 3 * mean);
    for (const int tokens : budgets) EXPECT_EQ(tokens % 16, (kFixed + 5) % 16);
  }
}

TEST(LayerBudgets, Powers_GetWhatMinimisesTheSum) {
  // a / n: the sum is least where n goes with the root of a.
  const Calibration c = WithLosses({{0.16 / 4, 0.16 / 16, 0.16 / 64}, {0.01 / 4, 0.01 / 16, 0.01 / 64}});
  const std::vector<int> budgets = LayerBudgets(c, kFixed + 16 * 40, kMiddle);
  EXPECT_NEAR(BudgetBlocks(budgets[0]), 64, 4);
  EXPECT_NEAR(BudgetBlocks(budgets[1]), 16, 4);
}

TEST(LayerBudgets, NothingToDivideBy_EveryLayerHasTheSame) {
  Calibration c = WithLosses({{0.04, 0.01, 0.0025}, {0.004, 0.001, 0.00025}, {0, 0, 0}});
  EXPECT_EQ(LayerBudgets(c, kFixed + 16 * 20, 20), std::vector<int>(3, kFixed + 16 * 20));  // all of it
  EXPECT_EQ(LayerBudgets(c, 160, kMiddle), std::vector<int>(3, 160));
  c.layers[1].losses.clear();
  EXPECT_EQ(LayerBudgets(c, 1024, kMiddle), std::vector<int>(3, 1024));
}

TEST(LayerBudgets, DenseLayers_HaveNoneAndTakeNone) {
  Calibration c = WithLosses({{0.04, 0.01, 0.0025}, {}, {0.004, 0.001, 0.00025}});
  c.layers[1].heads.clear();
  const std::vector<int> budgets = LayerBudgets(c, 1024, kMiddle);
  EXPECT_EQ(budgets[1], 0);
  EXPECT_GT(budgets[0], budgets[2]);
  EXPECT_EQ(Blocks(budgets), 2 * BudgetBlocks(1024));
}

TEST(LayerBudgets, RandomCurves_KeepTheMeanTheLeastAndTheMost) {
  constexpr uint64_t kSeed = 20261130;
  SCOPED_TRACE(kSeed);
  Random random(kSeed);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<double>> losses;
    const auto layers = 1 + random.Below(40);
    for (uint64_t l = 0; l < layers; ++l) {
      std::vector<double>& layer = losses.emplace_back();
      double loss = 1.0 / static_cast<double>(1 + random.Below(1000));
      for (int i = 0; i < 3; ++i) {
        layer.push_back(loss);
        loss /= static_cast<double>(1 + random.Below(8));
      }
    }
    const int middle = 10 + static_cast<int>(random.Below(1000));
    const int mean = 3 + static_cast<int>(random.Below(static_cast<uint64_t>(middle - 4)));
    const std::vector<int> budgets =
        LayerBudgets(WithLosses(losses), kFixed + 16 * mean, middle);
    EXPECT_EQ(Blocks(budgets), static_cast<int>(layers) * mean);
    for (const int tokens : budgets) {
      EXPECT_GE(BudgetBlocks(tokens), 2);
      EXPECT_LE(BudgetBlocks(tokens), std::min(middle, 8 * mean));
    }
  }
}

}  // namespace
}  // namespace kvt
