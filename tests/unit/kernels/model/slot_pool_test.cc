#include "kernels/model/slot_pool.h"

#include <algorithm>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

constexpr int kLayers = 3;

std::set<uint32_t> SlotsOf(const SlotPool& pool, PoolBlock block) {
  std::set<uint32_t> slots;
  for (const SlotPair& pair : pool.Pairs(block)) {
    EXPECT_TRUE(slots.insert(pair.base).second);
    if (pair.residual != kSlotNone) {
      EXPECT_TRUE(slots.insert(pair.residual).second);
    }
  }
  return slots;
}

TEST(SlotPool_Test, Allocate_TargetBlock_TakesTwoSlotsALayer) {
  SlotPool pool(kLayers, 20);
  ASSERT_TRUE(pool.TryReserve(6));
  const PoolBlock block = pool.Allocate(PoolBlockState::kTarget);
  EXPECT_EQ(SlotsOf(pool, block).size(), 6u);
  EXPECT_EQ(pool.free(), 14u);
  EXPECT_EQ(pool.reserved(), 0u);
}

TEST(SlotPool_Test, TryReserve_MoreThanAvailable_ChangesNothing) {
  SlotPool pool(kLayers, 10);
  ASSERT_TRUE(pool.TryReserve(6));
  EXPECT_FALSE(pool.TryReserve(5));
  EXPECT_EQ(pool.available(), 4u);
  EXPECT_TRUE(pool.TryReserve(4));
  pool.Unreserve(10);
  EXPECT_EQ(pool.available(), 10u);
}

TEST(SlotPool_Test, AllocatePair_TwoSlotsThatComeBackBehindTheStep) {
  SlotPool pool(kLayers, 4);
  ASSERT_TRUE(pool.TryReserve(4));
  const SlotPair a = pool.AllocatePair();
  const SlotPair b = pool.AllocatePair();
  EXPECT_EQ((std::set<uint32_t>{a.base, a.residual, b.base, b.residual}.size()), 4u);
  EXPECT_EQ(pool.free(), 0u);
  EXPECT_EQ(pool.blocks(), 0u);
  pool.ReleasePair(a, 2);
  pool.ReleasePair(b, 0);
  EXPECT_EQ(pool.free(), 2u);
  EXPECT_EQ(pool.retiring(), 2u);
  pool.Retire(2);
  EXPECT_EQ(pool.free(), 4u);
  EXPECT_EQ(pool.reserved(), 0u);
}

TEST(SlotPool_Test, Release_StepStillRuns_SlotsComeBackWhenItRetires) {
  SlotPool pool(kLayers, 6);
  ASSERT_TRUE(pool.TryReserve(6));
  const PoolBlock block = pool.Allocate(PoolBlockState::kTarget);
  pool.Release(block, 5);
  EXPECT_EQ(pool.free(), 0u);
  EXPECT_EQ(pool.retiring(), 6u);
  pool.Retire(4);
  EXPECT_FALSE(pool.TryReserve(1));
  pool.Retire(5);
  EXPECT_EQ(pool.retiring(), 0u);
  EXPECT_TRUE(pool.TryReserve(6));
}

TEST(SlotPool_Test, Release_StepAlreadyRetired_SlotsAreFreeAtOnce) {
  SlotPool pool(kLayers, 6);
  pool.Retire(9);
  ASSERT_TRUE(pool.TryReserve(6));
  pool.Release(pool.Allocate(PoolBlockState::kTarget), 9);
  EXPECT_EQ(pool.free(), 6u);
}

TEST(SlotPool_Test, Release_SharedBlock_LastOwnerFrees) {
  SlotPool pool(kLayers, 6);
  ASSERT_TRUE(pool.TryReserve(6));
  const PoolBlock block = pool.Allocate(PoolBlockState::kTarget);
  pool.AddReference(block);
  pool.Release(block, 0);
  EXPECT_EQ(pool.References(block), 1u);
  EXPECT_EQ(pool.free(), 0u);
  pool.Release(block, 0);
  EXPECT_EQ(pool.free(), 6u);
  EXPECT_EQ(pool.blocks(), 0u);
}

TEST(SlotPool_Test, Demote_TargetBlock_FreesHalfBehindTheStepAndRestoreTakesItAgain) {
  SlotPool pool(kLayers, 6);
  ASSERT_TRUE(pool.TryReserve(6));
  const PoolBlock block = pool.Allocate(PoolBlockState::kTarget);
  std::vector<uint32_t> base;
  for (const SlotPair& pair : pool.Pairs(block)) base.push_back(pair.base);
  pool.Demote(block, 2);
  EXPECT_EQ(pool.State(block), PoolBlockState::kBase);
  EXPECT_EQ(SlotsOf(pool, block).size(), 3u);
  EXPECT_EQ(pool.free(), 0u);
  pool.Retire(2);
  EXPECT_EQ(pool.free(), 3u);
  ASSERT_TRUE(pool.TryReserve(3));
  pool.Restore(block);
  EXPECT_EQ(pool.State(block), PoolBlockState::kTarget);
  for (int layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(pool.Pairs(block)[static_cast<size_t>(layer)].base, base[static_cast<size_t>(layer)]);
  }
  EXPECT_EQ(SlotsOf(pool, block).size(), 6u);
}

TEST(SlotPool_DeathTest, Allocate_NothingSetAside_IsABug) {
  SlotPool pool(kLayers, 6);
  EXPECT_DEATH((void)pool.Allocate(PoolBlockState::kTarget), "reserved=0");
}

TEST(SlotPool_DeathTest, Release_FreedBlock_IsABug) {
  SlotPool pool(kLayers, 6);
  ASSERT_TRUE(pool.TryReserve(6));
  const PoolBlock block = pool.Allocate(PoolBlockState::kTarget);
  pool.Release(block, 0);
  EXPECT_DEATH(pool.Release(block, 0), "block=");
}

// A random walk beside a plain model: no slot is in two blocks, none is lost, none comes back early.
TEST(SlotPool_Test, RandomOperations_AgainstAPlainModel_NeverShareOrLoseASlot) {
  const uint64_t seed = 20261129;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  constexpr uint32_t kSlots = 90;
  SlotPool pool(kLayers, kSlots);
  std::vector<PoolBlock> held;
  std::vector<std::pair<uint64_t, uint32_t>> retiring;  // (step, slots)
  uint64_t step = 0;
  for (int i = 0; i < 20000; ++i) {
    const uint64_t action = random.Next() % 5;
    if (action == 0) {
      const PoolBlockState state = random.Next() % 2 ? PoolBlockState::kTarget : PoolBlockState::kBase;
      if (pool.TryReserve(pool.SlotsPerBlock(state))) held.push_back(pool.Allocate(state));
    } else if (action == 1 && !held.empty()) {
      std::swap(held[random.Next() % held.size()], held.back());
      const uint64_t after = step + random.Next() % 3;
      retiring.emplace_back(after, pool.SlotsPerBlock(pool.State(held.back())));
      pool.Release(held.back(), after);
      held.pop_back();
    } else if (action == 2 && !held.empty()) {
      const PoolBlock block = held[random.Next() % held.size()];
      if (pool.State(block) == PoolBlockState::kTarget) {
        retiring.emplace_back(step + 1, kLayers);
        pool.Demote(block, step + 1);
      } else if (pool.TryReserve(kLayers)) {
        pool.Restore(block);
      }
    } else if (action == 3) {
      pool.Retire(++step);
    }
    std::erase_if(retiring, [&](const auto& entry) { return entry.first <= step; });
    std::set<uint32_t> all;
    size_t slots = 0;
    for (const PoolBlock block : held) {
      for (const uint32_t slot : SlotsOf(pool, block)) {
        ASSERT_LT(slot, kSlots);
        ASSERT_TRUE(all.insert(slot).second) << "slot " << slot << " in two blocks";
        ++slots;
      }
    }
    uint32_t waiting = 0;
    for (const auto& entry : retiring) waiting += entry.second;
    ASSERT_EQ(pool.retiring(), waiting);
    ASSERT_EQ(pool.free() + waiting + slots, kSlots);
  }
}

}  // namespace
}  // namespace kvt
