#include <optional>
#include <vector>

#include "decode_worker/pool/sequence_slots.h"
#include "decode_worker/pool/shared_blocks.h"
#include "gtest/gtest.h"

namespace kvt {
namespace {

constexpr int kLayers = 2;
constexpr uint32_t kBlockSlots = 2 * kLayers;

BlockKey Key(uint8_t n) {
  BlockKey key;
  key.bytes[0] = n;
  return key;
}

TEST(BlocksFor_Test, LastTokensKvIsNeverWritten) {
  EXPECT_EQ(BlocksFor(1), 1);
  EXPECT_EQ(BlocksFor(16), 1);
  EXPECT_EQ(BlocksFor(17), 1);
  EXPECT_EQ(BlocksFor(18), 2);
  EXPECT_EQ(BlocksFor(33), 2);
}

TEST(SequenceSlots_Test, TryCreate_NoRoom_RefusesWithoutAChange) {
  SlotPool pool(kLayers, 3 * kBlockSlots);
  std::optional<SequenceSlots> first = SequenceSlots::TryCreate(pool, 2);
  ASSERT_TRUE(first.has_value());
  EXPECT_FALSE(SequenceSlots::TryCreate(pool, 2).has_value());
  EXPECT_EQ(pool.available(), kBlockSlots);
  first->Release(0, nullptr);
  EXPECT_EQ(pool.available(), 3 * kBlockSlots);
}

TEST(SequenceSlots_Test, AppendShared_TwoSequences_HoldOneBlock) {
  SlotPool pool(kLayers, 4 * kBlockSlots);
  std::optional<SequenceSlots> first = SequenceSlots::TryCreate(pool, 2);
  std::optional<SequenceSlots> second = SequenceSlots::TryCreate(pool, 2);
  ASSERT_TRUE(first.has_value() && second.has_value());
  const PoolBlock block = first->AppendOwn();
  second->AppendShared(block);
  second->AppendOwn();
  EXPECT_EQ(pool.References(block), 2u);
  EXPECT_EQ(pool.blocks(), 2u);
  EXPECT_EQ(pool.available(), kBlockSlots);  // what was set aside for the shared block came back
  std::vector<PoolBlock> last;
  first->Release(0, &last);
  EXPECT_TRUE(last.empty());
  EXPECT_EQ(pool.References(block), 1u);
  second->Release(0, &last);
  EXPECT_EQ(last.size(), 2u);
  EXPECT_EQ(pool.free(), pool.total());
  EXPECT_EQ(pool.reserved(), 0u);
}

TEST(SequenceSlots_Test, Release_StepInFlight_SlotsWaitForIt) {
  SlotPool pool(kLayers, kBlockSlots);
  std::optional<SequenceSlots> slots = SequenceSlots::TryCreate(pool, 1);
  ASSERT_TRUE(slots.has_value());
  slots->AppendOwn();
  slots->Release(3, nullptr);
  slots->Release(3, nullptr);  // idempotent
  EXPECT_FALSE(SequenceSlots::TryCreate(pool, 1).has_value());
  pool.Retire(3);
  slots = std::nullopt;
  std::optional<SequenceSlots> next = SequenceSlots::TryCreate(pool, 1);
  ASSERT_TRUE(next.has_value());
  next->Release(0, nullptr);
}

TEST(SequenceSlots_Test, Table_TwoBlocks_IsLayerMajor) {
  SlotPool pool(kLayers, 2 * kBlockSlots);
  std::optional<SequenceSlots> slots = SequenceSlots::TryCreate(pool, 2);
  ASSERT_TRUE(slots.has_value());
  const PoolBlock a = slots->AppendOwn();
  const PoolBlock b = slots->AppendOwn();
  const std::vector<SlotPair> table = slots->Table(0, 2);
  ASSERT_EQ(table.size(), 4u);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(table[layer * 2], pool.Pairs(a)[layer]);
    EXPECT_EQ(table[layer * 2 + 1], pool.Pairs(b)[layer]);
  }
  EXPECT_EQ(slots->Table(1, 1)[1], pool.Pairs(b)[1]);
  slots->Release(0, nullptr);
}

TEST(SharedBlocks_Test, Publish_FirstWinsAndForgetRemoves) {
  SharedBlocks shared;
  shared.Publish(Key(1), PoolBlock(7));
  shared.Publish(Key(1), PoolBlock(8));
  EXPECT_EQ(shared.Find(Key(1)), PoolBlock(7));
  EXPECT_EQ(shared.Find(Key(2)), std::nullopt);
  shared.Forget(PoolBlock(8));
  EXPECT_EQ(shared.Find(Key(1)), PoolBlock(7));
  shared.Forget(PoolBlock(7));
  EXPECT_EQ(shared.Find(Key(1)), std::nullopt);
  EXPECT_EQ(shared.size(), 0u);
}

}  // namespace
}  // namespace kvt
