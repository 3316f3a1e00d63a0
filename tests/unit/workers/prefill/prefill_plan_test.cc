#include "prefill_worker/prefill_plan.h"


#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

using testing::ElementsAre;

TEST(PrefillPlan_Test, TakeChunk_NothingPresent_CoversAllTokensInBlockAlignedChunks) {
  PrefillPlan plan(100);
  EXPECT_EQ(plan.TakeChunk(40), (TokenRange{0, 32}));
  EXPECT_EQ(plan.TakeChunk(64), (TokenRange{32, 96}));
  EXPECT_FALSE(plan.AllTaken());
  EXPECT_EQ(plan.remaining_tokens(), 4);
  EXPECT_EQ(plan.TakeChunk(64), (TokenRange{96, 100}));
  EXPECT_TRUE(plan.AllTaken());
  EXPECT_EQ(plan.TakeChunk(64), std::nullopt);
}

TEST(PrefillPlan_Test, ReusableBlocks_WholeBlocks_LeavesTheLastBlockToCompute) {
  EXPECT_EQ(PrefillPlan(1).reusable_blocks(), 0);
  EXPECT_EQ(PrefillPlan(16).reusable_blocks(), 0);
  EXPECT_EQ(PrefillPlan(17).reusable_blocks(), 1);
  EXPECT_EQ(PrefillPlan(32).reusable_blocks(), 1);
  EXPECT_EQ(PrefillPlan(33).reusable_blocks(), 2);
}

TEST(PrefillPlan_Test, TakeChunk_PrefixAndHoles_ComputesOnlyWhatIsMissing) {
  PrefillPlan plan(100);
  for (const int block : {0, 1, 3, 5}) plan.SetPresent(block, true);
  EXPECT_THAT(plan.MissingBlocks(), ElementsAre(2, 4, 6));
  EXPECT_THAT(plan.MissingRanges(),
              ElementsAre(TokenRange{32, 48}, TokenRange{64, 80}, TokenRange{96, 100}));
  EXPECT_EQ(plan.computed_tokens_total(), 36);
  EXPECT_EQ(plan.tokens_done(), 64);
  EXPECT_EQ(plan.TakeChunk(512), (TokenRange{32, 48}));
  EXPECT_EQ(plan.TakeChunk(512), (TokenRange{64, 80}));
  EXPECT_EQ(plan.tokens_done(), 96);
  EXPECT_EQ(plan.TakeChunk(512), (TokenRange{96, 100}));
  EXPECT_TRUE(plan.AllTaken());
}

TEST(PrefillPlan_Test, SetPresent_BlockFoundLostAfterLookup_IsComputed) {
  PrefillPlan plan(48);
  plan.SetPresent(0, true);
  plan.SetPresent(1, true);
  plan.SetPresent(0, false);
  EXPECT_EQ(plan.TakeChunk(512), (TokenRange{0, 16}));
  EXPECT_EQ(plan.TakeChunk(512), (TokenRange{32, 48}));
}

TEST(PrefillPlan_DeathTest, SetPresent_LastBlock_IsABug) {
  PrefillPlan plan(32);
  EXPECT_DEATH(plan.SetPresent(1, true), "block=1");
}

TEST(PrefillPlan_Test, TakeChunk_RandomHolesAndSizes_TakesEveryMissingTokenOnceInOrder) {
  const uint64_t seed = 7;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  for (int round = 0; round < 500; ++round) {
    const int tokens = 1 + static_cast<int>(random.Next() % 700);
    PrefillPlan plan(tokens);
    std::vector<bool> want(static_cast<size_t>(tokens), true);
    for (int block = 0; block < plan.reusable_blocks(); ++block) {
      if (random.Next() % 3 == 0) continue;
      plan.SetPresent(block, true);
      for (int t = block * 16; t < block * 16 + 16; ++t) want[static_cast<size_t>(t)] = false;
    }
    int at = 0;
    while (!plan.AllTaken()) {
      const auto chunk = plan.TakeChunk(16 + static_cast<int>(random.Next() % 200));
      ASSERT_TRUE(chunk.has_value());
      ASSERT_GE(chunk->begin, at);
      ASSERT_EQ(chunk->begin % 16, 0);
      ASSERT_TRUE(chunk->end % 16 == 0 || chunk->end == tokens);
      for (int t = chunk->begin; t < chunk->end; ++t) {
        ASSERT_TRUE(want[static_cast<size_t>(t)]);
        want[static_cast<size_t>(t)] = false;
      }
      at = chunk->end;
    }
    ASSERT_EQ(at, tokens);
    for (const bool left : want) ASSERT_FALSE(left);
  }
}

}  // namespace
}  // namespace kvt
