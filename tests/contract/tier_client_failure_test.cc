// TierClient against stores that die, restart, stall, lie or move.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "tests/contract/tier_fixture.h"

namespace kvt {
namespace {

class TierFailureTest : public TierTest {
 protected:
  // A request of its own finds every block of the sequence, and reads what was written.
  void ExpectReadsAll(TierWorker& worker, const HeldTicket& ticket, const SequenceBlocks& sequence,
                      const TestSlots& written, LookupReach reach = LookupReach::kOwners) {
    const LookupResult found = worker.tier().Lookup(ticket, sequence.blocks(), reach);
    EXPECT_EQ(found.exact_blocks, kLongBlocks);
    TestSlots read(TestGeometry(), kLongBlocks);
    EXPECT_EQ(worker.PullAll(ticket.ref(), found.blocks, read).blocks_ok, kLongBlocks);
    for (int i = 0; i < kLongBlocks; ++i) ASSERT_TRUE(read.SameBlock(written, i, i));
  }
};

TEST_P(TierFailureTest, F2_StoreKilledMidPull_LosesItsBlocksOnly) {
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const ClusterView view = View();
  const HeldTicket ticket = NewTicket(view);
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(7);
  Write(*worker, ticket, sequence, written);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  ASSERT_EQ(found.exact_blocks, kLongBlocks);

  // In loopback it dies while its burst hangs; elsewhere at some point before or while it flies.
  LoopbackFaults* faults = stores_[1]->faults();
  if (faults != nullptr) faults->SetStalled(true);
  TestSlots read(TestGeometry(), kLongBlocks);
  std::vector<PullBlock> list;
  for (int i = 0; i < kLongBlocks; ++i) {
    list.push_back({ticket.ref(), &found.blocks[i], read.Addresses(i, Plane::kBase),
                    read.Addresses(i, Plane::kResidual)});
  }
  std::vector<TransferOutcome> outcomes(kLongBlocks);
  TransferWaiter waiter;
  TierPull pull;
  pull.blocks = list;
  pull.layer_end = TestGeometry().layers;
  pull.outcomes = absl::MakeSpan(outcomes);
  pull.done = waiter.Done();
  worker->tier().Pull(std::move(pull));
  EXPECT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-0").pull_bursts > 0; }));
  EXPECT_TRUE(faults == nullptr || !waiter.IsDone());
  stores_[1]->Kill();
  waiter.Wait();

  int of_dead = 0;
  for (int i = 0; i < kLongBlocks; ++i) {
    const bool dead = OwnerIndex(sequence.blocks()[i], view) == 1;
    of_dead += dead;
    EXPECT_TRUE(dead || outcomes[i] == TransferOutcome::kOk) << i;
    EXPECT_TRUE(outcomes[i] == TransferOutcome::kLost || read.SameBlock(written, i, i)) << i;
    if (dead && faults != nullptr) {
      EXPECT_EQ(outcomes[i], TransferOutcome::kLost) << i;
    }
  }
  EXPECT_GT(of_dead, 0);
  // Once it is known dead, everything of it is lost and the rest still comes.
  ASSERT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-1").state != "up"; }));
  TestSlots again_read(TestGeometry(), kLongBlocks);
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, again_read).blocks_lost, of_dead);
  // From then on it counts as absent, at once, and what it owned is written to the next in order.
  const LookupResult again = worker->tier().Lookup(NewTicket(view), sequence.blocks());
  EXPECT_EQ(again.unreachable, std::vector<NodeName>{"store-1"});
  const HeldTicket later = NewTicket(view);
  const SequenceBlocks more = Sequence(kLongBlocks, 50'000);
  TestSlots other(TestGeometry(), kLongBlocks);
  other.Fill(8);
  Write(*worker, later, more, other);
  EXPECT_EQ(worker->tier().Lookup(later, more.blocks()).exact_blocks, kLongBlocks);
}

TEST_P(TierFailureTest, StoreRestarted_OldPlacesAreLostAndANewSessionServes) {
  StartStores(1);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(8);
  TestSlots written(TestGeometry(), 8);
  written.Fill(9);
  Write(*worker, ticket, sequence, written);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  ASSERT_EQ(found.exact_blocks, 8);

  stores_[0]->Restart();
  worker->tier().SetView(View());
  ASSERT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-0").sessions_opened == 2; }));
  ASSERT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
  TestSlots read(TestGeometry(), 8);
  const TransferResult stale = worker->PullAll(ticket.ref(), found.blocks, read);
  EXPECT_EQ(stale.blocks_lost, 8);
  EXPECT_EQ(stale.bursts, 0u);
  // The same ticket looks up, finds nothing, writes again and reads.
  EXPECT_EQ(worker->tier().Lookup(ticket, sequence.blocks()).base_blocks, 0);
  Write(*worker, ticket, sequence, written);
  const LookupResult fresh = worker->tier().Lookup(ticket, sequence.blocks());
  EXPECT_EQ(worker->PullAll(ticket.ref(), fresh.blocks, read).blocks_ok, 8);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(read.SameBlock(written, i, i));
  // Stale places stay lost, although handles of the new boot may equal old ones.
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, read).blocks_lost, 8);
}

TEST_P(TierFailureTest, SessionEndedAtTheStore_IsReopenedWithoutAViewChange) {
  StartStores(1);
  auto worker = StartConnected("decode-0", FastOptions());
  const ClusterView view = View();
  stores_[0]->Restart();
  // Whatever is called first meets NotFound or a dead channel; soon a new session serves.
  const SequenceBlocks sequence = Sequence(2);
  TestSlots slots(TestGeometry(), 2);
  ASSERT_TRUE(Eventually([&] {
    (void)worker->tier().Lookup(NewTicket(view), sequence.blocks());
    return FiguresOf(*worker, "store-0").sessions_opened == 2 &&
           worker->tier().WaitConnected(absl::ZeroDuration()).ok();
  }));
  Write(*worker, NewTicket(view), sequence, slots);
}

TEST_P(TierFailureTest, F14_StoreThatFails_IsSkippedByTheBreakerAndProbed) {
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const ClusterView view = View();
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  Write(*worker, NewTicket(view), sequence, written);

  stores_[1]->gate().SetFailure(absl::UnavailableError("cut off"));
  ASSERT_TRUE(Eventually([&] {
    (void)worker->tier().Lookup(NewTicket(view), sequence.blocks());
    return FiguresOf(*worker, "store-1").state != "up";
  }));
  EXPECT_EQ(FiguresOf(*worker, "store-1").breaker_opened, 1u);
  const LookupResult without = worker->tier().Lookup(NewTicket(view), sequence.blocks());
  EXPECT_EQ(without.unreachable, std::vector<NodeName>{"store-1"});
  int present = 0;
  for (int i = 0; i < kLongBlocks; ++i) {
    const bool cut_off = OwnerIndex(sequence.blocks()[i], view) == 1;
    EXPECT_EQ(without.blocks[i].has_residual(), !cut_off) << i;
    present += !cut_off;
  }
  EXPECT_GT(present, 0);
  // The session survives: pins and blocks are where they were.
  stores_[1]->gate().SetFailure(absl::OkStatus());
  ASSERT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-1").state == "up"; }));
  EXPECT_EQ(FiguresOf(*worker, "store-1").sessions_opened, 1u);
  EXPECT_EQ(worker->tier().Lookup(NewTicket(view), sequence.blocks()).exact_blocks, kLongBlocks);
}

TEST_P(TierFailureTest, SlowStore_DoesNotHoldUpLookupBeyondItsTimeout) {
  StartStores(2);
  ClientOptions options = FastOptions();
  options.lookup_timeout = absl::Milliseconds(200);
  options.breaker_failures = 100;
  auto worker = StartConnected("decode-0", options);
  const ClusterView view = View();
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  Write(*worker, NewTicket(view), sequence, written);
  stores_[0]->gate().SetDelay(absl::Seconds(20));
  const absl::Time start = RealClock::Get().Now();
  const LookupResult found = worker->tier().Lookup(NewTicket(view), sequence.blocks());
  EXPECT_LT(RealClock::Get().Now() - start, absl::Seconds(5));
  EXPECT_EQ(found.unreachable, std::vector<NodeName>{"store-0"});
  for (int i = 0; i < kLongBlocks; ++i) {
    EXPECT_EQ(found.blocks[i].has_base(), OwnerIndex(sequence.blocks()[i], view) == 1) << i;
  }
  stores_[0]->gate().SetDelay(absl::ZeroDuration());
}

TEST_P(TierFailureTest, FlippedByte_IsLostWithChecksumsAndDeliveredWithout) {
  StartStores(1);
  auto careful = StartConnected("decode-0", FastOptions());
  ClientOptions off = FastOptions();
  off.verify_checksums = false;
  auto careless = StartConnected("decode-1", off);
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots written(TestGeometry(), 4);
  written.Fill(11);
  Write(*careful, ticket, sequence, written);
  const LookupResult found = careful->tier().Lookup(ticket, sequence.blocks());
  const LookupResult same = careless->tier().Lookup(ticket, sequence.blocks());
  ASSERT_EQ(found.exact_blocks, 4);
  ASSERT_EQ(same.exact_blocks, 4);
  stores_[0]->FlipByte(found.blocks[2].place, Plane::kBase, TestGeometry().SliceOffset(1, 1) + 5);

  TestSlots read(TestGeometry(), 4);
  std::vector<TransferOutcome> outcomes;
  careful->PullAll(ticket.ref(), found.blocks, read, &outcomes);
  EXPECT_EQ(outcomes[2], TransferOutcome::kLost);
  for (const int i : {0, 1, 3}) {
    EXPECT_EQ(outcomes[i], TransferOutcome::kOk);
    EXPECT_TRUE(read.SameBlock(written, i, i));
  }
  EXPECT_EQ(FiguresOf(*careful, "store-0").corrupt_pieces, 1u);
  careless->PullAll(ticket.ref(), same.blocks, read, &outcomes);
  EXPECT_EQ(outcomes[2], TransferOutcome::kOk);
  EXPECT_FALSE(read.SameBlock(written, 2, 2));
}

TEST_P(TierFailureTest, ViewChange_LookupAsksThePreviousOwnerToo) {
  StartStores(3);
  auto worker = StartWorker("decode-0", FastOptions());
  const ClusterView one = View(1);
  worker->tier().SetView(one);
  ASSERT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(13);
  Write(*worker, NewTicket(one), sequence, written);

  const ClusterView three = View();
  worker->tier().SetView(three);
  ASSERT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
  int moved = 0;
  for (const TierBlock& block : sequence.blocks()) moved += OwnerIndex(block, three) != 0;
  ASSERT_GT(moved, 0);
  ExpectReadsAll(*worker, NewTicket(three), sequence, written);
}

// A worker that starts with the cluster may ask for what another wrote while its own links were not
// yet all up: the blocks lie where the writer could write, not with their owners.
TEST_P(TierFailureTest, WrittenWhileTheOwnerWasDown_FoundByAReaderThatReachesIt) {
  StartStores(3);
  const ClusterView view = View();
  auto writer = StartWorker("prefill-0", FastOptions());
  stores_[0]->gate().SetFailure(absl::UnavailableError("cut off"));
  writer->tier().SetView(view);
  ASSERT_TRUE(Eventually([&] {
    return FiguresOf(*writer, "store-1").state == "up" && FiguresOf(*writer, "store-2").state == "up";
  }));
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(15);
  const HeldTicket ticket = NewTicket(view);
  Write(*writer, ticket, sequence, written);
  stores_[0]->gate().SetFailure(absl::OkStatus());

  auto reader = StartConnected("decode-0", FastOptions());
  EXPECT_LT(reader->tier().Lookup(ticket, sequence.blocks()).exact_blocks, kLongBlocks);
  ExpectReadsAll(*reader, ticket, sequence, written, LookupReach::kEveryStore);
}

// A sequence that ends while a reservation of it is on its way: the store may see the release first.
TEST_P(TierFailureTest, ReleaseOvertakesAReserve_NothingIsHeldSoonAfter) {
  StartStores(1);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  stores_[0]->gate().HoldReserve(true);
  std::thread reserving([&] {
    (void)worker->tier().Reserve(ticket, sequence.blocks(), 2, ReserveMode::kKeepGranted);
  });
  EXPECT_TRUE(Eventually([&] { return stores_[0]->gate().reserves_held() == 1; }));
  const int calls = stores_[0]->gate().calls();
  worker->tier().Release(ticket.ref());
  EXPECT_TRUE(Eventually([&] { return stores_[0]->gate().calls() > calls; }));
  stores_[0]->gate().HoldReserve(false);
  reserving.join();
  worker->tier().Release(ticket.ref());
  // Long before the next renewal, a third of ten seconds away, would let it go.
  EXPECT_TRUE(Eventually([&] { return stores_[0]->Stats().tickets == 0; }, absl::Seconds(1)));
  EXPECT_EQ(stores_[0]->Stats().reserved_bytes, 0u);
}

TEST_P(TierFailureTest, Sessions_OutliveTheirLeaseByRenewalAndPinsOfLiveTicketsStay) {
  TestStoreOptions short_lease;
  short_lease.lease = absl::Seconds(1);
  StartStores(1, short_lease);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots slots(TestGeometry(), 4);
  Write(*worker, ticket, sequence, slots);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  const absl::Time start = RealClock::Get().Now();
  EXPECT_TRUE(Eventually([&] { return RealClock::Get().Now() - start > absl::Seconds(3); }));
  EXPECT_EQ(FiguresOf(*worker, "store-0").sessions_opened, 1u);
  TestSlots read(TestGeometry(), 4);
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, read).blocks_ok, 4);
  // A worker that goes away without a word: the store lets go within a lease.
  stores_[0]->gate().SetFailure(absl::UnavailableError("cut off"));
  EXPECT_TRUE(Eventually([&] { return Pins() == 0; }));
  EXPECT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-0").state != "up"; }));
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, read).blocks_lost, 4);
}

// F1: the lease ends while the pins are held, and the memory goes to other blocks. What the reader
// still asks for is told to have expired, and its slots stay as they were.
TEST_P(TierFailureTest, F1_LeaseEndedAndMemoryReused_IsToldAndNeverForeignBytes) {
  TestStoreOptions small;
  small.lease = absl::Seconds(1);
  small.arena_bytes = 1 * kMiB;
  StartStores(1, small);
  auto reader = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(8);
  TestSlots written(TestGeometry(), 8);
  written.Fill(41);
  Write(*reader, ticket, sequence, written);
  const LookupResult found = reader->tier().Lookup(ticket, sequence.blocks());
  ASSERT_EQ(found.exact_blocks, 8);
  // The reader cannot renew; the store lets go of its pins when the lease is over.
  stores_[0]->gate().SetFailure(absl::UnavailableError("cut off"));
  ASSERT_TRUE(Eventually([&] { return stores_[0]->Stats().lapsed_leases == 1; }));
  EXPECT_EQ(Pins(), 0u);
  stores_[0]->gate().SetFailure(absl::OkStatus());
  auto writer = StartConnected("prefill-0", FastOptions());
  // Everything that is not pinned goes to others.
  for (int round = 0; round < 4; ++round) {
    const HeldTicket other = NewTicket(View());
    const SequenceBlocks more = Sequence(40, 100'000 * (round + 1), other.ticket.id);
    TestSlots bytes(TestGeometry(), 40);
    bytes.Fill(1000 + round);
    Write(*writer, other, more, bytes);
    writer->tier().Release(other.ref());
    ASSERT_TRUE(Eventually([&] { return Pins() == 0; }));
  }
  ASSERT_GT(stores_[0]->Stats().evicted_blocks, 8u);
  TestSlots read(TestGeometry(), 8), untouched(TestGeometry(), 8);
  read.Fill(77);
  untouched.Fill(77);
  const TransferResult stale = reader->PullAll(ticket.ref(), found.blocks, read);
  EXPECT_EQ(stale.blocks_lost, 8);
  EXPECT_EQ(stale.pieces_expired, 16u);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(read.SameBlock(untouched, i, i)) << i;
  EXPECT_EQ(FiguresOf(*reader, "store-0").expired_pieces, 16u);
  // It connects again under a new session, in which nothing of the old one counts.
  ASSERT_TRUE(Eventually([&] { return FiguresOf(*reader, "store-0").sessions_opened == 2; }));
  EXPECT_EQ(reader->PullAll(ticket.ref(), found.blocks, read).pieces_expired, 16u);
}

TEST_P(TierFailureTest, StoreThatLeftTheView_IsKeptWhileTicketsLiveThereThenLetGo) {
  TestStoreOptions short_lease;
  short_lease.lease = absl::Seconds(1);
  StartStores(2, short_lease);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots slots(TestGeometry(), kLongBlocks);
  Write(*worker, ticket, sequence, slots);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  worker->tier().SetView(View(1));
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, slots).blocks_ok, kLongBlocks);
  EXPECT_EQ(FiguresOf(*worker, "store-1").state, "up");
  worker->tier().Release(ticket.ref());
  EXPECT_TRUE(Eventually([&] { return stores_[1]->Stats().sessions == 0; }));
  EXPECT_EQ(stores_[0]->Stats().sessions, 1u);
  // It comes back with the next view that names it.
  worker->tier().SetView(View());
  EXPECT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
  EXPECT_EQ(stores_[1]->Stats().sessions, 1u);
}

// Every store is stopped: control calls hang. The first lookups wait, each at most for its timeout;
// once the breakers are open nobody waits any more, and when the stores are back all is as it was.
TEST_P(TierFailureTest, F14_WholeTierStopped_LaterRequestsDoNotWaitAndItComesBack) {
  StartStores(2);
  ClientOptions options = FastOptions();
  options.lookup_timeout = absl::Milliseconds(200);
  options.control_timeout = absl::Milliseconds(500);
  auto worker = StartConnected("decode-0", options);
  const ClusterView view = View();
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(31);
  Write(*worker, NewTicket(view), sequence, written);
  for (auto& store : stores_) store->gate().SetDelay(absl::Seconds(15));
  const absl::Time stopped = RealClock::Get().Now();
  int waited = 0;
  for (; FiguresOf(*worker, "store-0").state == "up" || FiguresOf(*worker, "store-1").state == "up";
       ++waited) {
    ASSERT_LT(RealClock::Get().Now() - stopped, absl::Seconds(10));
    EXPECT_EQ(worker->tier().Lookup(NewTicket(view), sequence.blocks()).base_blocks, 0);
  }
  EXPECT_LE(waited, 2 * options.breaker_failures + 2);
  const absl::Time open = RealClock::Get().Now();
  for (int i = 0; i < 50; ++i) {
    const LookupResult found = worker->tier().Lookup(NewTicket(view), sequence.blocks());
    EXPECT_EQ(found.base_blocks, 0);
    EXPECT_EQ(found.unreachable.size(), 2u);
    EXPECT_TRUE(absl::IsUnavailable(
        worker->tier()
            .Reserve(NewTicket(view), sequence.blocks(), 0, ReserveMode::kAllOrNothing)
            .status()));
  }
  // 100 calls in the time of a few timeouts.
  EXPECT_LT(RealClock::Get().Now() - open, absl::Seconds(2));
  for (auto& store : stores_) store->gate().SetDelay(absl::ZeroDuration());
  ASSERT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
  ExpectReadsAll(*worker, NewTicket(view), sequence, written);
}

// Each time it is back it fails again before the link counts as settled: the pauses grow, so that
// requests meet the failure ever more rarely.
TEST_P(TierFailureTest, F14_FlappingStore_IsAskedEverMoreRarely) {
  StartStores(1);
  ClientOptions options = FastOptions();
  options.breaker_failures = 1;
  options.breaker_pause = absl::Milliseconds(40);
  options.breaker_pause_max = absl::Seconds(30);
  auto worker = StartConnected("decode-0", options);
  const ClusterView view = View();
  const SequenceBlocks sequence = Sequence(1);
  absl::Duration pause = options.breaker_pause;
  for (int flap = 0; flap < 5; ++flap, pause *= 2) {
    const int sessions = static_cast<int>(FiguresOf(*worker, "store-0").sessions_opened);
    stores_[0]->gate().SetFailure(absl::UnavailableError("flapping"));
    const absl::Time failed = RealClock::Get().Now();
    (void)worker->tier().Lookup(NewTicket(view), sequence.blocks());
    ASSERT_NE(FiguresOf(*worker, "store-0").state, "up");
    // Well again at once: it is not asked before the pause is over.
    stores_[0]->gate().SetFailure(absl::OkStatus());
    ASSERT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-0").state == "up"; }));
    EXPECT_GE(RealClock::Get().Now() - failed, pause) << flap;
    EXPECT_EQ(static_cast<int>(FiguresOf(*worker, "store-0").sessions_opened), sessions);
  }
  EXPECT_EQ(FiguresOf(*worker, "store-0").breaker_opened, 5u);
}

TEST_P(TierFailureTest, F14_NoStoreReachable_ReserveSaysWhyAndWriteBackGoesOn) {
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  for (auto& store : stores_) store->gate().SetFailure(absl::UnavailableError("cut off"));
  const auto all = worker->tier().Reserve(ticket, sequence.blocks(), 8, ReserveMode::kAllOrNothing);
  EXPECT_TRUE(absl::IsUnavailable(all.status())) << all.status();
  EXPECT_TRUE(absl::StrContains(all.status().message(), "cut off")) << all.status();
  const auto some = worker->tier().Reserve(ticket, sequence.blocks(), 0, ReserveMode::kKeepGranted);
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_EQ(some->refused, 4);
}

TEST_P(TierFailureTest, Cancel_EndsATransferEarly) {
  if (GetParam() != TestPlane::kLoopback) GTEST_SKIP() << "faults are injected in loopback";
  StartStores(1);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots slots(TestGeometry(), 4);
  Write(*worker, ticket, sequence, slots);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  stores_[0]->faults()->SetStalled(true);
  const PullBlock block = {ticket.ref(), &found.blocks[0], slots.Addresses(0, Plane::kBase),
                           nullptr};
  TransferOutcome outcome = TransferOutcome::kOk;
  TransferWaiter waiter;
  TierPull pull;
  pull.blocks = absl::MakeConstSpan(&block, 1);
  pull.layer_end = 1;
  pull.outcomes = absl::MakeSpan(&outcome, 1);
  pull.done = waiter.Done();
  const TransferId id = worker->tier().Pull(std::move(pull));
  worker->tier().Cancel(id);
  EXPECT_EQ(waiter.Wait().blocks_lost, 1);
  EXPECT_EQ(outcome, TransferOutcome::kLost);
  worker->tier().Cancel(id);  // ended: nothing
  stores_[0]->faults()->SetStalled(false);
}

INSTANTIATE_TEST_SUITE_P(Planes, TierFailureTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
