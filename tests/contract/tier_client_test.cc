// TierClient against real stores: finding, writing, reading, room.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/contract/tier_fixture.h"

namespace kvt {
namespace {

class TierClientTest : public TierTest {};

TEST_P(TierClientTest, PushedBlocks_ByAnotherWorker_AreFoundAndPulledBitByBit) {
  StartStores(2);
  auto prefill = StartConnected("prefill-0", FastOptions());
  auto decode = StartConnected("decode-0", FastOptions());
  const ClusterView view = View();
  const HeldTicket ticket = NewTicket(view);
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(3);
  Write(*prefill, ticket, sequence, written);

  const LookupResult found = decode->tier().Lookup(ticket, sequence.blocks());
  EXPECT_EQ(found.exact_blocks, kLongBlocks);
  EXPECT_EQ(found.base_blocks, kLongBlocks);
  EXPECT_TRUE(found.unreachable.empty());
  TestSlots read(TestGeometry(), kLongBlocks);
  const TransferResult pulled = decode->PullAll(ticket.ref(), found.blocks, read);
  EXPECT_EQ(pulled.blocks_ok, kLongBlocks);
  EXPECT_EQ(pulled.bytes, written.bytes());
  EXPECT_EQ(pulled.bursts, 2u);  // one per store
  for (int i = 0; i < kLongBlocks; ++i) ASSERT_TRUE(read.SameBlock(written, i, i)) << i;

  for (int i = 0; i < 2; ++i) EXPECT_GT(stores_[i]->Stats().blocks, 0u) << i;
  EXPECT_EQ(Pins(), 2u * kLongBlocks);
  prefill->tier().Release(ticket.ref());
  decode->tier().Release(ticket.ref());
  EXPECT_TRUE(Eventually([&] { return Pins() == 0; }));
}

TEST_P(TierClientTest, StoresThatHaveJustBecomeKnown_AreWaitedForByTheFirstLookup) {
  StartStores(2);
  auto prefill = StartConnected("prefill-0", FastOptions());
  const ClusterView view = View();
  const HeldTicket ticket = NewTicket(view);
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  Write(*prefill, ticket, sequence, written);
  auto started = StartWorker("decode-0", FastOptions());
  started->tier().SetView(view);
  const LookupResult found = started->tier().Lookup(NewTicket(view), sequence.blocks());
  EXPECT_EQ(found.exact_blocks, kLongBlocks);
  EXPECT_TRUE(found.unreachable.empty());
}

TEST_P(TierClientTest, Pull_OfALayerRange_TouchesThatRangeOnly) {
  StartStores(1);
  auto worker = StartConnected("prefill-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots written(TestGeometry(), 4);
  written.Fill(5);
  Write(*worker, ticket, sequence, written);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  TestSlots read(TestGeometry(), 4);
  TestSlots untouched(TestGeometry(), 4);
  const TransferResult first = worker->PullAll(ticket.ref(), found.blocks, read, nullptr, 1, 2);
  EXPECT_EQ(first.bytes, written.bytes() / 3);
  for (int layer = 0; layer < 3; ++layer) {
    const TestSlots& want = layer == 1 ? written : untouched;
    const size_t bytes = TestGeometry().SlotBytes();
    EXPECT_EQ(std::memcmp(*read.Addresses(2, Plane::kResidual, layer),
                     *want.Addresses(2, Plane::kResidual, layer), bytes), 0) << layer;
  }
  worker->PullAll(ticket.ref(), found.blocks, read, nullptr, 0, 1);
  worker->PullAll(ticket.ref(), found.blocks, read, nullptr, 2, 3);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(read.SameBlock(written, i, i));
}

TEST_P(TierClientTest, BlocksNotSealed_AreAbsent) {
  StartStores(2);
  auto worker = StartConnected("prefill-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(8);
  auto reserved = worker->tier().Reserve(ticket, sequence.blocks(), 0, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  for (const SealOutcome outcome : worker->SealAll(ticket.ref(), reserved->blocks)) {
    EXPECT_EQ(outcome, SealOutcome::kIncomplete);
  }
  const HeldTicket other = NewTicket(View());
  EXPECT_EQ(worker->tier().Lookup(other, sequence.blocks()).base_blocks, 0);
}

TEST_P(TierClientTest, Reserve_WithoutRoomInOneStore_LetsEverythingGo) {
  TestStoreOptions small;
  small.arena_bytes = 2 * kMiB;  // about 80 blocks of 24 KiB
  StartStores(2, small);
  auto worker = StartConnected("prefill-0", FastOptions());
  const ClusterView view = View();
  const HeldTicket first = NewTicket(view);
  const SequenceBlocks pinned = Sequence(20);
  TestSlots slots(TestGeometry(), 20);
  Write(*worker, first, pinned, slots);
  const SequenceBlocks huge = Sequence(400, 100'000);
  const HeldTicket second = NewTicket(view);
  ASSERT_EQ(worker->tier().Lookup(second, pinned.blocks()).exact_blocks, 20);
  const auto refused = worker->tier().Reserve(second, huge.blocks(), 0, ReserveMode::kAllOrNothing);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_TRUE(absl::StrContains(refused.status().message(), "store-")) << refused.status();
  uint64_t reserved = 0;
  for (auto& store : stores_) reserved += store->Stats().reserved_bytes;
  EXPECT_EQ(reserved, 0u);
  EXPECT_EQ(Pins(), 20u);  // the first ticket's; the second one's lookup was let go, too
  // The first ticket is untouched, and smaller requests still fit.
  TestSlots few(TestGeometry(), 4);
  Write(*worker, NewTicket(view), Sequence(4, 900'000), few);
  EXPECT_EQ(worker->tier().Lookup(first, pinned.blocks()).exact_blocks, 20);
}

TEST_P(TierClientTest, Reserve_KeepGranted_ReturnsRefusedBlocksAsAbsent) {
  TestStoreOptions small;
  small.arena_bytes = 1 * kMiB;
  StartStores(1, small);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks kept = Sequence(8);
  TestSlots slots(TestGeometry(), 8);
  Write(*worker, ticket, kept, slots);
  const SequenceBlocks huge = Sequence(100, 100'000);
  const auto result = worker->tier().Reserve(ticket, huge.blocks(), 0, ReserveMode::kKeepGranted);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->refused, 100);
  EXPECT_FALSE(result->blocks[0].has_base());
  EXPECT_EQ(Pins(), 8u);  // what the ticket has stays
}

TEST_P(TierClientTest, Reserve_ForOutput_HoldsRoomUntilRelease) {
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  auto reserved = worker->tier().Reserve(ticket, sequence.blocks(), 60, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  const auto room = [&] {
    uint64_t sum = 0;
    for (auto& store : stores_) sum += store->Stats().output_reserved_blocks;
    return sum;
  };
  EXPECT_GE(room(), 60u);
  worker->tier().Release(ticket.ref());
  EXPECT_TRUE(Eventually([&] { return room() == 0; }));
}

TEST_P(TierClientTest, SecondWriterOfAPrefix_GetsTheWinnersBlocks) {
  StartStores(1);
  auto a = StartConnected("prefill-0", FastOptions());
  auto b = StartConnected("prefill-1", FastOptions());
  const HeldTicket first = NewTicket(View());
  const HeldTicket second = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots slots(TestGeometry(), 4);
  slots.Fill(17);
  auto mine = b->tier().Reserve(second, sequence.blocks(), 0, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(mine.ok());
  Write(*a, first, sequence, slots);
  // Sealed meanwhile: the loser's pushes end well or are void, and its seal points to the winner.
  b->PushLayers(second.ref(), mine->blocks, slots);
  for (const SealOutcome outcome : b->SealAll(second.ref(), mine->blocks)) {
    EXPECT_EQ(outcome, SealOutcome::kSealed);
  }
  TestSlots read(TestGeometry(), 4);
  EXPECT_EQ(b->PullAll(second.ref(), mine->blocks, read).blocks_ok, 4);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(read.SameBlock(slots, i, i));
  EXPECT_EQ(stores_[0]->Stats().blocks, 4u);
  // A third finds them sealed at once.
  const HeldTicket third = NewTicket(View());
  auto sealed = b->tier().Reserve(third, sequence.blocks(), 0, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(sealed.ok());
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(sealed->already_sealed[i]);
}

TEST_P(TierClientTest, ManyTransfersAtOnce_AllEnd) {
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(19);
  Write(*worker, ticket, sequence, written);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  constexpr int kTransfers = 1000;  // more than a channel takes at once
  TestSlots read(TestGeometry(), kTransfers);
  std::vector<PullBlock> list(kTransfers);
  std::vector<TransferOutcome> outcomes(kTransfers, TransferOutcome::kLost);
  std::vector<TransferWaiter> waiters(kTransfers);
  for (int i = 0; i < kTransfers; ++i) {
    list[i] = {ticket.ref(), &found.blocks[i % kLongBlocks], read.Addresses(i, Plane::kBase),
               read.Addresses(i, Plane::kResidual)};
    TierPull pull;
    pull.blocks = absl::MakeSpan(list).subspan(i, 1);
    pull.layer_end = TestGeometry().layers;
    pull.outcomes = absl::MakeSpan(outcomes).subspan(i, 1);
    pull.done = waiters[i].Done();
    worker->tier().Pull(std::move(pull));
  }
  for (int i = 0; i < kTransfers; ++i) {
    EXPECT_EQ(waiters[i].Wait().blocks_ok, 1) << i;
    EXPECT_EQ(outcomes[i], TransferOutcome::kOk) << i;
    EXPECT_TRUE(read.SameBlock(written, i, i % kLongBlocks)) << i;
  }
}

// A reply carries every checksum of every block: 34 MiB of them here, in one call too near the bound
// of a message.
TEST_P(TierClientTest, LookupWhoseReplyWouldBeHuge_IsSplit) {
  StartStores(1);
  model_.geometry.layers = 32;
  model_.geometry.kv_heads = 8;
  model_.geometry.head_dim = 32;
  auto worker = StartConnected("prefill-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(kSequenceBlocksMax);
  EXPECT_EQ(worker->tier().Lookup(ticket, sequence.blocks()).base_blocks, 0);
  const StoreLinkFigures figures = FiguresOf(*worker, "store-0");
  EXPECT_EQ(figures.lookups, 2u);
  EXPECT_EQ(figures.lookup_blocks, uint64_t{kSequenceBlocksMax});
}

TEST_P(TierClientTest, AnotherGeometry_IsRefusedWithBothNamed) {
  StartStores(1);
  auto first = StartConnected("prefill-0", FastOptions());
  model_.geometry.kv_heads = 4;  // the same model by name
  auto second = StartWorker("decode-0", FastOptions());
  second->tier().SetView(View());
  const HeldTicket ticket = NewTicket(View());
  (void)second->tier().WaitConnected(absl::Seconds(2));
  // A store may keep several geometries apart; never may one read the other's blocks.
  const SequenceBlocks sequence = Sequence(4);
  TestSlots slots(TestGeometry(), 4);
  Write(*first, ticket, sequence, slots);
  EXPECT_EQ(second->tier().Lookup(ticket, sequence.blocks()).base_blocks, 0);
}

INSTANTIATE_TEST_SUITE_P(Planes, TierClientTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
