#include "kernels/select/attention_stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace kvt {
namespace {

TEST(MeasureHead, AttentionThatEveryQueryPays_HasMassAndNoExcess) {
  std::vector<float> p(4 * 100, 0.005f);  // four queries alike
  for (int q = 0; q < 4; ++q) p[static_cast<size_t>(q * 100 + 7)] = 0.3f;
  const HeadStats stats = MeasureHead(p, 4);
  EXPECT_NEAR(stats.middle_mass, 99 * 0.005 + 0.3, 1e-6);
  EXPECT_NEAR(stats.top16_excess, 0, 1e-6);
}

TEST(MeasureHead, AttentionThatMovesWithTheQuery_HasExcess) {
  std::vector<float> p(4 * 100, 0);
  for (int q = 0; q < 4; ++q) p[static_cast<size_t>(q * 100 + 10 * q)] = 0.4f;
  const HeadStats stats = MeasureHead(p, 4);
  EXPECT_NEAR(stats.middle_mass, 0.4, 1e-6);
  EXPECT_NEAR(stats.top16_excess, 0.3, 1e-6);  // 0.4 less its mean over queries, 0.1
}

TEST(MeasureHead, SixteenLargestOnly) {
  std::vector<float> p(2 * 40, 0);
  for (size_t j = 0; j < 20; ++j) p[j] = 0.04f;        // the first query: 20 tokens
  for (size_t j = 20; j < 40; ++j) p[40 + j] = 0.04f;  // the second: 20 others
  EXPECT_NEAR(MeasureHead(p, 2).top16_excess, 16 * 0.02, 1e-6);
}

TEST(Captured, Mean_OfMassAndOfItsLog) {
  Captured a;
  a.Add(0.5);
  Captured b;
  b.Add(1.0);
  b.Add(0.0);  // everything lost: finite
  a.Add(b);
  EXPECT_EQ(a.Mean().rows, 3);
  EXPECT_NEAR(a.Mean().mass, 0.5, 1e-12);
  EXPECT_NEAR(a.Mean().kl, (std::log(2.0) + std::log(1e6)) / 3, 1e-9);
  EXPECT_EQ(Captured().Mean().rows, 0);
}

TEST(TopBlocks, LargestAscending_LowerIndexOfEqualOnes) {
  const std::vector<float> scores = {0.1f, 0.5f, 0.5f, 0.2f, 0.5f};
  EXPECT_EQ(TopBlocks(scores, 2), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(TopBlocks(scores, 9), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_TRUE(TopBlocks(scores, 0).empty());
}

TEST(SelectedBlocks, SinkRecentAndSelected_StayWithinTheBudget) {
  for (int position = 0; position < 3000; ++position) {
    const MiddleBlocks middle = MiddleOf(position);
    ASSERT_EQ(middle.first, 1);
    // Every one of the last 128 tokens is a sink or recent.
    ASSERT_LE(middle.end * 16, std::max(16, position + 1 - 128));
    for (const int budget : {256, 512, 1024, 2048}) {
      const int selected = SelectedBlocks(budget, position);
      ASSERT_LE(selected, middle.count());
      const int rest = position + 1 - middle.count() * 16;
      ASSERT_LE(selected * 16 + rest, budget);
      ASSERT_TRUE(selected == middle.count() || (selected + 1) * 16 + rest > budget)
          << position << " " << budget;
    }
  }
}

}  // namespace
}  // namespace kvt
