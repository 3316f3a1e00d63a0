#include "kernels/select/selecting_set.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <utility>

namespace kvt {
namespace {

constexpr Geometry kGeometry = {4, 3, 64};

std::vector<LayerMeasure> Measures() {
  return {{{0.1, 0.5, 0.4}, {0.6, 0.2, 0.1}},
          {{0.3, 0.1, 0.2}, {0.1, 0.2, 0.3}},
          {{0.2, 0.2, 0.1}, {0.2, 0.2, 0.2}},
          {{0, 0, 0}, {0, 0, 0}}};
}

// A loss in which each head takes a share of its own away.
SetLoss LossOf(std::vector<std::vector<double>> shares) {
  return [shares = std::move(shares)](int layer, const std::vector<int>& heads) {
    double loss = 1;
    for (const int head : heads) loss -= shares[static_cast<size_t>(layer)][static_cast<size_t>(head)];
    return loss;
  };
}

SetLoss Shares() {
  return LossOf({{0.3, 0.2, 0.1}, {0.5, 0.05, 0.25}, {0.4, 0.02, 0.01}, {0.1, 0.1, 0.1}});
}

TEST(DigestShare, OneHeadOfThreeInFourBits) {
  EXPECT_NEAR(DigestShare(kGeometry, 4), 1.0 / 24, 1e-12);  // FACTS: 4.2 %
  EXPECT_NEAR(DigestShare({30, 8, 128}, 4), 1.0 / 64, 1e-12);
}

TEST(SelectingSet, RoomForOneHeadEach_TakesTheLargestExcess) {
  SelectingSetOptions options;
  options.digest_share_max = 0.042;
  const auto sets = ChooseSelectingSets(kGeometry, Measures(), options, Shares());
  ASSERT_TRUE(sets.ok()) << sets.status();
  EXPECT_EQ((*sets)[0].heads, std::vector<int>{1});
  EXPECT_EQ((*sets)[0].runner_up, 2);
  EXPECT_NEAR((*sets)[0].margin, 0.2, 1e-12);
  EXPECT_EQ((*sets)[0].mam_head, 0);
  EXPECT_EQ((*sets)[0].least_head, 0);
  EXPECT_EQ((*sets)[1].heads, std::vector<int>{0});
  EXPECT_EQ((*sets)[2].heads, std::vector<int>{0});  // a tie: the lower number
  EXPECT_EQ((*sets)[3].margin, 0);
}

TEST(SelectingSet, SpareBytes_GoWhereTheLossFallsMost) {
  SelectingSetOptions options;
  options.digest_share_max = 6.0 / (4 * 24);  // six digests for four layers
  const auto sets = ChooseSelectingSets(kGeometry, Measures(), options, Shares());
  ASSERT_TRUE(sets.ok()) << sets.status();
  EXPECT_EQ((*sets)[0].heads, (std::vector<int>{1, 0}));  // -0.3
  EXPECT_EQ((*sets)[1].heads, (std::vector<int>{0, 2}));  // -0.25
  EXPECT_EQ((*sets)[2].heads.size(), 1u);
  EXPECT_NEAR((*sets)[0].loss, 0.5, 1e-12);
}

TEST(SelectingSet, GainTooSmall_LeavesBytesUnused) {
  SelectingSetOptions options;
  options.digest_share_max = 1;
  options.gain_min = 0.15;
  const auto sets = ChooseSelectingSets(kGeometry, Measures(), options, Shares());
  ASSERT_TRUE(sets.ok()) << sets.status();
  size_t heads = 0;
  for (const LayerChoice& choice : *sets) heads += choice.heads.size();
  EXPECT_EQ(heads, 6u);
}

TEST(SelectingSet, WorstLayersGoDense_AndTheirBytesToOthers) {
  SelectingSetOptions options;
  options.digest_share_max = 4.0 / (4 * 24);
  options.dense_layers_max = 1;
  options.dense_loss_min = 0.7;
  const auto sets = ChooseSelectingSets(kGeometry, Measures(), options, Shares());
  ASSERT_TRUE(sets.ok()) << sets.status();
  EXPECT_TRUE((*sets)[3].heads.empty());  // loses 0.9
  EXPECT_EQ((*sets)[0].heads.size(), 2u);
}

TEST(SelectingSet, NotEvenOneHeadEach_IsRefusedWithTheRemedy) {
  SelectingSetOptions options;
  options.digest_share_max = 0.02;
  const auto sets = ChooseSelectingSets(kGeometry, Measures(), options, Shares());
  ASSERT_EQ(sets.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(sets.status().message().find("raise the share"), absl::string_view::npos);
}

}  // namespace
}  // namespace kvt
