// Room over several stores (DESIGN 3): many tickets that together exceed the stores by far are all
// served, none starves, none waits for another for ever, and nothing is held at the end.
#include <algorithm>
#include <atomic>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/random.h"
#include "tests/contract/tier_fixture.h"

namespace kvt {
namespace {

constexpr absl::Duration kAgedAfter = absl::Milliseconds(100);
// A ticket that waits for longer has starved.
constexpr absl::Duration kWaitMax = absl::Seconds(30);

class TierReserveTest : public TierTest {
 protected:
  void Start(int stores, int workers) {
    TestStoreOptions small;
    small.arena_bytes = 2 * kMiB;  // 84 blocks of 24 KiB
    StartStores(stores, small);
    for (int i = 0; i < workers; ++i) {
      workers_.push_back(StartConnected(absl::StrCat("worker-", i), FastOptions()));
    }
  }

  // Asks until it is granted, as a prefill worker does; how long that took. Infinite: starved.
  absl::Duration AskUntilGranted(TierWorker& worker, const HeldTicket& ticket,
                                 const SequenceBlocks& sequence, uint32_t output, Random& random,
                                 std::vector<PlacedBlock>* places) {
    const absl::Time began = RealClock::Get().Now();
    while (true) {
      const absl::Duration waited = RealClock::Get().Now() - began;
      if (waited > kWaitMax) return absl::InfiniteDuration();
      (void)worker.tier().Lookup(ticket, sequence.blocks());  // pins what it finds, as OpenJob does
      ReserveTerms terms = ReserveMode::kAllOrNothing;
      if (waited >= kAgedAfter) terms.waited = waited;
      auto reserved = worker.tier().Reserve(ticket, sequence.blocks(), output, terms);
      if (reserved.ok()) {
        *places = std::move(reserved->blocks);
        return RealClock::Get().Now() - began;
      }
      EXPECT_TRUE(absl::IsResourceExhausted(reserved.status())) << reserved.status();
      ++refusals_;
      Pause(absl::Milliseconds(5 + random.Below(10)));
    }
  }

  // A request: room, all bytes, a while of decoding, the end.
  absl::Duration Serve(TierWorker& worker, const HeldTicket& ticket, int blocks, uint32_t output,
                       int32_t first_token, Random& random) {
    const SequenceBlocks sequence = Sequence(blocks, first_token, ticket.ticket.id);
    std::vector<PlacedBlock> places;
    const absl::Duration waited =
        AskUntilGranted(worker, ticket, sequence, output, random, &places);
    if (waited < absl::InfiniteDuration()) {
      TestSlots slots(TestGeometry(), blocks);
      slots.Fill(ticket.ticket.id.value());
      worker.PushLayers(ticket.ref(), places, slots);
      worker.SealAll(ticket.ref(), places);
      Pause(absl::Milliseconds(5));
    }
    worker.tier().Release(ticket.ref());
    return waited;
  }

  static void Pause(absl::Duration duration) {
    const absl::Time until = RealClock::Get().Now() + duration;
    (void)Eventually([&] { return RealClock::Get().Now() >= until; });
  }

  uint64_t Held() {
    uint64_t sum = Pins();
    for (auto& store : stores_) {
      const StoreStats stats = store->Stats();
      sum += stats.in_flight + stats.reserved_bytes + stats.writing_bytes +
             stats.output_reserved_blocks + stats.tickets;
    }
    return sum;
  }
  void ExpectNothingHeld() {
    EXPECT_TRUE(Eventually([&] { return Held() == 0; })) << Held() << " still held";
  }

  std::vector<std::unique_ptr<TierWorker>> workers_;
  std::atomic<int> refusals_{0};
};

TEST_P(TierReserveTest, TicketsBeyondTheStores_AreAllServedAndLeaveNothing) {
  constexpr int kWorkers = 3;
  constexpr int kThreads = 2;  // of each worker
  constexpr int kTickets = 12;  // of each thread
  const uint64_t seed = Random::FromEntropy().Next();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  Start(3, kWorkers);  // 252 blocks
  std::vector<HeldTicket> tickets;
  for (int i = 0; i < kWorkers * kThreads * kTickets; ++i) tickets.push_back(NewTicket(View()));
  std::atomic<int64_t> longest_ms{0};
  std::atomic<int> starved{0};
  std::atomic<int> blocks_asked{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kWorkers * kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(seed + static_cast<uint64_t>(t));
      for (int i = 0; i < kTickets; ++i) {
        const int index = t * kTickets + i;
        // One of three needs most of a store (73 blocks at most); the others a little.
        const int blocks = static_cast<int>(random.Below(3)) == 0
                               ? 35 + static_cast<int>(random.Below(20))
                               : 5 + static_cast<int>(random.Below(20));
        const auto output = static_cast<uint32_t>(random.Below(20));
        blocks_asked += blocks;
        const absl::Duration waited =
            Serve(*workers_[static_cast<size_t>(t) % kWorkers], tickets[static_cast<size_t>(index)],
                  blocks, output, 1 + 100'000 * (1 + index), random);
        if (waited == absl::InfiniteDuration()) {
          ++starved;
        } else {
          const int64_t ms = absl::ToInt64Milliseconds(waited);
          int64_t before = longest_ms;
          while (before < ms && !longest_ms.compare_exchange_weak(before, ms)) {
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(starved, 0);
  EXPECT_GT(blocks_asked, 4 * 252);
  EXPECT_GT(refusals_, 0);
  std::cout << "seed " << seed << ": " << tickets.size() << " tickets, " << refusals_
            << " refusals, longest wait " << longest_ms << " ms\n";
  ExpectNothingHeld();
}

TEST_P(TierReserveTest, LargeTicketAmongASteadyStreamOfSmallOnes_DoesNotStarve) {
  Start(2, 3);
  const uint64_t seed = Random::FromEntropy().Next();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  // Tickets are made on this thread only.
  std::vector<std::vector<HeldTicket>> small(8);
  for (auto& list : small) {
    for (int i = 0; i < 2000; ++i) list.push_back(NewTicket(View()));
  }
  const HeldTicket large = NewTicket(View());
  std::atomic<bool> done{false};
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < small.size(); ++t) {
    threads.emplace_back([&, t] {
      Random random(seed + t);
      TierWorker& worker = *workers_[1 + t % 2];
      for (size_t i = 0; i < small[t].size() && !done; ++i) {
        const HeldTicket& ticket = small[t][i];
        const SequenceBlocks sequence =
            Sequence(12, static_cast<int32_t>(1'000'000 * (t + 1) + 400 * i), ticket.ticket.id);
        std::vector<PlacedBlock> places;
        EXPECT_LT(AskUntilGranted(worker, ticket, sequence, 0, random, &places), kWaitMax);
        ++served;
        Pause(absl::Milliseconds(5 + random.Below(10)));
        worker.tier().Release(ticket.ref());
      }
    });
  }
  ASSERT_TRUE(Eventually([&] { return served > 20; }));
  Random random(seed + 99);
  const absl::Duration waited = Serve(*workers_[0], large, 8, 100, 1, random);
  done = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(waited, absl::Seconds(10));
  std::cout << "seed " << seed << ": " << served << " small ones served; the large one waited "
            << waited << "\n";
  ExpectNothingHeld();
}

// 62 of 84 blocks at one store and 42 at the other: no two at once, and which store is short differs.
TEST_P(TierReserveTest, AgedTicketsThatEachNeedMostOfBothStores_TakeTurns) {
  Start(2, 4);
  std::vector<HeldTicket> tickets;
  for (int i = 0; i < 16; ++i) tickets.push_back(NewTicket(View()));
  std::atomic<int> starved{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Random random(t);
      for (size_t i = 0; i < 4; ++i) {
        const size_t index = t * 4 + i;
        const absl::Duration waited =
            Serve(*workers_[t], tickets[index], 4, 100, static_cast<int32_t>(1 + 100'000 * index),
                  random);
        if (waited == absl::InfiniteDuration()) ++starved;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(starved, 0);
  ExpectNothingHeld();
}

TEST_P(TierReserveTest, AgedTicket_KeepsAtTheFirstStoreWhatItWasGrantedAndNothingBehindTheRefusal) {
  Start(2, 2);
  const HeldTicket full = NewTicket(View());
  const HeldTicket aged = NewTicket(View());
  // All of the second store: its room for output, asked of it alone.
  HeldTicket second = full;
  second.ticket.stores = {stores_[1]->ref()};
  second.signed_ticket = signer_->Sign(second.ticket);
  uint32_t blocks = 80;
  while (blocks > 0 &&
         !workers_[0]->tier().Reserve(second, {}, blocks, ReserveMode::kAllOrNothing).ok()) {
    --blocks;
  }
  ASSERT_GT(blocks, 40u);
  ReserveTerms terms = ReserveMode::kAllOrNothing;
  EXPECT_TRUE(absl::IsResourceExhausted(
      workers_[1]->tier().Reserve(aged, {}, 60, terms).status()));
  EXPECT_EQ(stores_[0]->Stats().output_reserved_blocks, 0u);
  terms.waited = absl::Seconds(1);
  EXPECT_TRUE(absl::IsResourceExhausted(
      workers_[1]->tier().Reserve(aged, {}, 60, terms).status()));
  EXPECT_EQ(stores_[0]->Stats().output_reserved_blocks, 30u);
  workers_[0]->tier().Release(second.ref());
  EXPECT_TRUE(Eventually(
      [&] { return workers_[1]->tier().Reserve(aged, {}, 60, terms).ok(); }));
  workers_[1]->tier().Release(aged.ref());
  ExpectNothingHeld();
}

TEST_P(TierReserveTest, DeadlineThatIsOver_AsksNobodyAndLetsGo) {
  Start(1, 1);
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  ReserveTerms terms = ReserveMode::kAllOrNothing;
  terms.deadline = RealClock::Get().Now();
  const auto reserved = workers_[0]->tier().Reserve(ticket, sequence.blocks(), 4, terms);
  EXPECT_TRUE(absl::IsDeadlineExceeded(reserved.status())) << reserved.status();
  ExpectNothingHeld();
}

INSTANTIATE_TEST_SUITE_P(Planes, TierReserveTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
