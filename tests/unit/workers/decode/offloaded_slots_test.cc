#include "decode_worker/offload/offloaded_slots.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "decode_worker/offload/offload_shape.h"
#include "gtest/gtest.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

constexpr int kLayers = 3;  // layer 1 is dense
constexpr uint32_t kPoolSlots = 2000;

Calibration TestCalibration() {
  Calibration calibration;
  calibration.geometry.layers = kLayers;
  calibration.layers.resize(kLayers);
  for (const size_t l : {0, 2}) calibration.layers[l].heads.resize(1);
  return calibration;
}

// Budget for 10 selected blocks; a sequence of 60 blocks has a middle of 51 at its end.
OffloadBudget TestBudget() { return {.tokens = 16 + 128 + 160, .hot_factor = 2, .fetch_share = 0.1}; }
constexpr int kBlocks = 60;

TEST(OffloadedShape_Test, WithoutCurves_HotSlotsAreEqualAndDenseLayersHaveNone) {
  const OffloadedShape shape = ShapeFor(TestCalibration(), TestBudget(), kBlocks);
  EXPECT_EQ(shape.hot_slots, (std::vector<int>{20, 0, 20}));
  EXPECT_EQ(shape.dense_layers(), 1);
  EXPECT_EQ(shape.whole_max, 10 + kOffloadedLagBlocks);
  EXPECT_EQ(shape.Slots(), 2u * (20 + 20 + 60 + 2 * 14));
}

TEST(OffloadedShape_Test, MissCurves_GiveTheLayerThatMissesMore) {
  Calibration calibration = TestCalibration();
  for (const size_t l : {0, 2}) {
    calibration.layers[l].miss_least = 20;  // of twice the selection
    calibration.layers[l].miss_step = 10;
  }
  calibration.layers[0].misses = {4, 4, 4, 4};
  calibration.layers[2].misses = {12, 6, 3, 1};
  const OffloadedShape shape = ShapeFor(calibration, TestBudget(), kBlocks);
  EXPECT_EQ(shape.hot_slots[0], 10);
  EXPECT_EQ(shape.hot_slots[2], 25);
}

TEST(OffloadedShape_Test, Losses_DivideTheBudgetAndHotSlotsFollow) {
  Calibration calibration = TestCalibration();
  calibration.layers[0].losses = {0.5, 0.2, 0.05};
  calibration.layers[2].losses = {0.002, 0.001, 0.0005};
  const OffloadedShape shape = ShapeFor(calibration, TestBudget(), kBlocks);
  EXPECT_EQ(shape.selected[0] + shape.selected[2], 2 * 10);
  EXPECT_GT(shape.selected[0], 10);
  EXPECT_EQ(shape.budgets[0], TestBudget().tokens + 16 * (shape.selected[0] - 10));
  EXPECT_EQ(shape.budgets[1], 0);
  EXPECT_EQ(shape.hot_slots[0], 2 * shape.selected[0]);
  EXPECT_EQ(shape.hot_slots[2], 8);  // a few selected blocks still have room to be digested in
  EXPECT_LT(2 * shape.selected[2], 8);
}

TEST(OffloadedShape_Test, ShortSequence_NeedsNoMoreThanItHas) {
  const OffloadedShape shape = ShapeFor(TestCalibration(), TestBudget(), 5);
  EXPECT_EQ(shape.hot_slots, (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(shape.Slots(), 2u * 5 * kLayers);  // as a resident one
}

TEST(FetchesMax_Test, ShareOfTheSequence_AtLeastOne) {
  EXPECT_EQ(FetchesMax(TestBudget(), 60), 6);
  EXPECT_EQ(FetchesMax(TestBudget(), 3), 1);
}

class OffloadedSlotsTest : public testing::Test {
 protected:
  ~OffloadedSlotsTest() override {
    slots_->Release(0);
    EXPECT_EQ(pool_.free(), pool_.total());
    EXPECT_EQ(pool_.reserved(), 0u);
  }
  static OffloadedShape Shape() { return ShapeFor(TestCalibration(), TestBudget(), kBlocks); }
  // Sink, middle [1, 31), recent [31, 40).
  void Fill() {
    EXPECT_TRUE(slots_->AppendWhole());
    for (int b = 1; b < 31; ++b) slots_->AppendStored();
    for (int b = 31; b < 40; ++b) EXPECT_TRUE(slots_->AppendWhole());
  }
  static constexpr int kPosition = 40 * kBlockTokens - 1;  // MiddleOf: [1, 32)

  SlotPool pool_{kLayers, kPoolSlots};
  std::optional<OffloadedSlots> slots_ = OffloadedSlots::TryCreate(pool_, Shape());
};

TEST_F(OffloadedSlotsTest, TryCreate_NoRoom_ChangesNothing) {
  const uint32_t left = pool_.available();
  EXPECT_EQ(left, kPoolSlots - Shape().Slots());
  EXPECT_FALSE(OffloadedSlots::TryCreate(pool_, ShapeFor(TestCalibration(), TestBudget(), 1500))
                   .has_value());
  EXPECT_EQ(pool_.available(), left);
}

TEST_F(OffloadedSlotsTest, Select_Misses_AreFetchedOnceAndThenHits) {
  Fill();
  const std::vector<int32_t> wanted = {3, 7, 12};
  const LayerSelection first = slots_->Select(0, wanted, {}, 10);
  EXPECT_EQ(first.blocks, wanted);
  ASSERT_EQ(first.fetches.size(), 3u);
  EXPECT_EQ(first.fetches[1].pair, slots_->Pair(0, 7));
  EXPECT_EQ(slots_->Pair(2, 7), SlotPair());  // each layer has its own
  EXPECT_TRUE(slots_->Select(0, wanted, {}, 10).fetches.empty());
  slots_->Forget(0, 7);
  const LayerSelection again = slots_->Select(0, wanted, {}, 10);
  ASSERT_EQ(again.fetches.size(), 1u);
  EXPECT_EQ(again.fetches[0].block, 7);
}

TEST_F(OffloadedSlotsTest, Select_BeyondTheCap_LeavesOutTheLowestScoredMisses) {
  Fill();
  (void)slots_->Select(0, std::vector<int32_t>{5}, {}, 10);
  const LayerSelection capped = slots_->Select(0, std::vector<int32_t>{2, 4, 5, 6, 8},
                                               std::vector<float>{.2f, .4f, .01f, .1f, .3f}, 2);
  EXPECT_EQ(capped.blocks, (std::vector<int32_t>{4, 5, 8}));  // 5 is a hit, however low
  EXPECT_EQ(capped.left_out, 2);
  EXPECT_EQ(capped.fetches.size(), 2u);
}

TEST_F(OffloadedSlotsTest, Select_WholeBlockOfTheMiddle_IsAHitWithoutAHotSlot) {
  Fill();
  const LayerSelection selection = slots_->Select(0, std::vector<int32_t>{2, 31}, {}, 10);
  EXPECT_EQ(selection.blocks, (std::vector<int32_t>{2, 31}));
  ASSERT_EQ(selection.fetches.size(), 1u);
  EXPECT_EQ(selection.fetches[0].block, 2);
}

TEST_F(OffloadedSlotsTest, Table_IsSinksSelectedAndRecentBlocks) {
  Fill();
  const LayerSelection selection = slots_->Select(2, std::vector<int32_t>{9, 20}, {}, 10);
  const std::vector<SlotPair> table = slots_->Table(2, kPosition, selection.blocks);
  ASSERT_EQ(table.size(), 1u + 2u + 8u);
  EXPECT_EQ(table[0], slots_->Pair(2, 0));
  EXPECT_EQ(table[1], selection.fetches[0].pair);
  EXPECT_EQ(table[3], slots_->Pair(2, 32));
  EXPECT_EQ(table[10], slots_->Pair(2, 39));
}

TEST_F(OffloadedSlotsTest, LetGo_FreesRoomForTheNextWholeBlockAndKeepsDenseLayers) {
  Fill();
  const uint32_t left = pool_.available();
  const SlotPair dense = slots_->Pair(1, 31);
  for (int b = 40; b < kBlocks; ++b) {
    slots_->LetGo(b - 9, 0);
    ASSERT_TRUE(slots_->AppendWhole());
  }
  EXPECT_EQ(pool_.available(), left);  // within what was set aside
  EXPECT_EQ(slots_->whole_blocks(), 10);
  EXPECT_EQ(slots_->Pair(1, 31), dense);
  EXPECT_EQ(slots_->Pair(0, 31), SlotPair());
}

TEST_F(OffloadedSlotsTest, AppendWhole_NothingStored_TakesMoreUntilThePoolIsEmpty) {
  Fill();
  const uint32_t left = pool_.available();
  ASSERT_TRUE(pool_.TryReserve(left - 4));  // room for one block more in the two layers
  for (int b = 40; b < 44; ++b) ASSERT_TRUE(slots_->AppendWhole());  // the shape's lag
  EXPECT_TRUE(slots_->AppendWhole());
  EXPECT_EQ(pool_.available(), 0u);
  EXPECT_FALSE(slots_->AppendWhole());
  slots_->LetGo(31, 0);  // what was taken beyond the shape goes back
  EXPECT_EQ(pool_.available(), 4u);
  pool_.Unreserve(left - 4);
}

TEST_F(OffloadedSlotsTest, Release_StepInFlight_SlotsWaitForIt) {
  Fill();
  (void)slots_->Select(0, std::vector<int32_t>{4}, {}, 10);
  slots_->Release(7);
  EXPECT_LT(pool_.free(), pool_.total());
  EXPECT_EQ(pool_.reserved(), 0u);
  pool_.Retire(7);
  EXPECT_EQ(pool_.free(), pool_.total());
}

// Layer 2 goes round 25 blocks with 20 slots and misses all of them; layer 0 needs 10.
TEST_F(OffloadedSlotsTest, EndStep_HotSlotsGoToTheLayerThatMisses) {
  Fill();
  const std::vector<int32_t> same = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  int fetches = 0;
  for (int step = 0; step < 40 * kBalanceSteps; ++step) {
    (void)slots_->Select(0, same, {}, 100);
    std::set<int32_t> round;
    for (int i = 0; i < 5; ++i) round.insert(1 + (5 * step + i) % 25);
    const LayerSelection selection =
        slots_->Select(2, std::vector<int32_t>(round.begin(), round.end()), {}, 100);
    if (step >= 39 * kBalanceSteps) fetches += static_cast<int>(selection.fetches.size());
    slots_->EndStep();
  }
  EXPECT_EQ(slots_->HotPairs(0).size() + slots_->HotPairs(2).size(), 40u);
  EXPECT_GE(slots_->HotPairs(2).size(), 25u);
  EXPECT_GE(slots_->HotPairs(0).size(), 10u);
  EXPECT_EQ(fetches, 0);
}

TEST_F(OffloadedSlotsTest, RandomSteps_NoTwoBlocksShareASlot) {
  Fill();
  constexpr uint64_t kSeed = 20261201;
  SCOPED_TRACE(kSeed);
  Random random(kSeed);
  for (int step = 0; step < 300; ++step) {
    const int layer = random.Below(2) == 0 ? 0 : 2;
    std::set<int32_t> wanted;
    while (wanted.size() < 10) wanted.insert(1 + static_cast<int32_t>(random.Below(31)));
    const std::vector<int32_t> blocks(wanted.begin(), wanted.end());
    const LayerSelection selection =
        slots_->Select(layer, blocks, {}, 1 + static_cast<int>(random.Below(10)));
    EXPECT_EQ(static_cast<int>(selection.blocks.size()) + selection.left_out, 10);
    if (!selection.fetches.empty() && random.Below(4) == 0) {
      slots_->Forget(layer, selection.fetches[0].block);
    }
    slots_->EndStep();
    std::set<uint32_t> seen;
    for (const int l : {0, 1, 2}) {
      for (int b = 0; b < slots_->blocks(); ++b) {
        const SlotPair pair = slots_->Pair(l, b);
        if (pair.base == kSlotNone) continue;
        ASSERT_TRUE(seen.insert(pair.base).second && seen.insert(pair.residual).second)
            << "step " << step << " layer " << l << " block " << b;
      }
    }
  }
}

}  // namespace
}  // namespace kvt
