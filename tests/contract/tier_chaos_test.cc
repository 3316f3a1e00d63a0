// Requests of several workers over stores that are cut off, restarted and re-placed at random. What
// must hold whatever happens (FIELD-CASES F1, F2, F4): every transfer ends once; a block that is
// said to have arrived holds its own bytes; in the end nothing is pinned or reserved.
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

constexpr int kStores = 3;
constexpr int kWorkers = 3;
constexpr int kRequestsPerWorker = 40;
constexpr int kFamilies = 6;  // prefixes that requests share
constexpr int kBlocksMax = 40;

struct Tally {
  std::atomic<int> written{0}, read{0}, lost{0}, refused{0}, foreign{0};
};

class TierChaosTest : public TierTest {
 protected:
  // A request as a worker makes it: look up, read what is there, write the rest, read it all again.
  void RunRequest(TierWorker& worker, Random& random, const HeldTicket& ticket, Tally& tally) {
    const int count = 1 + static_cast<int>(random.Below(kBlocksMax));
    const auto family = static_cast<int32_t>(random.Below(kFamilies));
    const SequenceBlocks sequence = Sequence(count, 100'000 * (family + 1), ticket.ticket.id);
    TestSlots expected(TestGeometry(), count);
    for (int i = 0; i < count; ++i) {
      expected.FillBlock(i, sequence.blocks()[i].name.key.Hash64());
    }
    const LookupResult found = worker.tier().Lookup(ticket, sequence.blocks());
    Read(worker, ticket, found.blocks, expected, tally);

    const ReserveMode mode =
        random.Below(2) == 0 ? ReserveMode::kAllOrNothing : ReserveMode::kKeepGranted;
    auto reserved = worker.tier().Reserve(ticket, sequence.blocks(),
                                          static_cast<uint32_t>(random.Below(8)), mode);
    if (!reserved.ok()) {
      ++tally.refused;
      return;
    }
    std::vector<TransferOutcome> pushed;
    worker.PushLayers(ticket.ref(), reserved->blocks, expected, &pushed);
    worker.SealAll(ticket.ref(), reserved->blocks);
    for (const TransferOutcome outcome : pushed) {
      ++(outcome == TransferOutcome::kOk ? tally.written : tally.lost);
    }
    Read(worker, ticket, worker.tier().Lookup(ticket, sequence.blocks()).blocks, expected, tally);
  }

  static void Read(TierWorker& worker, const HeldTicket& ticket,
                   const std::vector<PlacedBlock>& blocks, const TestSlots& expected,
                   Tally& tally) {
    TestSlots slots(TestGeometry(), static_cast<int>(blocks.size()));
    std::vector<TransferOutcome> outcomes;
    worker.PullAll(ticket.ref(), blocks, slots, &outcomes);
    for (size_t i = 0; i < blocks.size(); ++i) {
      const int block = static_cast<int>(i);
      if (outcomes[i] != TransferOutcome::kOk) {
        ++tally.lost;
      } else if (slots.SameBlock(expected, block, block)) {
        ++tally.read;
      } else {
        ++tally.foreign;
      }
    }
  }

  // One thing that goes wrong, or right again.
  void Disturb(Random& random, std::vector<std::unique_ptr<TierWorker>>& workers) {
    TestStore& store = *stores_[random.Below(kStores)];
    switch (random.Below(4)) {
      case 0:
        store.gate().SetFailure(absl::UnavailableError("cut off"));
        break;
      case 1:
        store.gate().SetFailure(absl::OkStatus());
        break;
      case 2:
        store.Restart();
        break;
      default: {
        const ClusterView view = View(1 + static_cast<int>(random.Below(kStores)));
        for (auto& worker : workers) worker->tier().SetView(view);
        break;
      }
    }
  }
};

TEST_P(TierChaosTest, RandomFaults_NeverGiveForeignBytesOrLeavePins) {
  const uint64_t seed = Random::FromEntropy().Next();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  TestStoreOptions options;
  options.arena_bytes = 4 * kMiB;  // small: eviction and refusals take part
  options.lease = absl::Seconds(2);
  StartStores(kStores, options);
  std::vector<std::unique_ptr<TierWorker>> workers;
  for (int i = 0; i < kWorkers; ++i) {
    workers.push_back(StartConnected(absl::StrCat("worker-", i), FastOptions()));
  }
  std::vector<std::vector<HeldTicket>> tickets(kWorkers);
  for (auto& list : tickets) {
    for (int r = 0; r < kRequestsPerWorker; ++r) list.push_back(NewTicket(View()));
  }

  Tally tally;
  std::atomic<int> running{kWorkers};
  std::vector<std::thread> threads;
  for (int i = 0; i < kWorkers; ++i) {
    threads.emplace_back([&, i] {
      Random random(seed + i + 1);
      for (const HeldTicket& ticket : tickets[i]) {
        RunRequest(*workers[i], random, ticket, tally);
        workers[i]->tier().Release(ticket.ref());
      }
      --running;
    });
  }
  Random random(seed);
  while (running > 0) {
    Disturb(random, workers);
    const absl::Time next = RealClock::Get().Now() + absl::Milliseconds(1 + random.Below(40));
    (void)Eventually([&] { return running == 0 || RealClock::Get().Now() >= next; });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(tally.foreign, 0);
  EXPECT_GT(tally.read, 0);
  EXPECT_GT(tally.written, 0);
  std::cout << "seed " << seed << ": blocks written " << tally.written << ", read " << tally.read
            << ", lost " << tally.lost << "; reservations refused " << tally.refused << "\n";
  for (auto& store : stores_) store->gate().SetFailure(absl::OkStatus());
  const auto held = [&] {
    uint64_t sum = Pins();
    for (auto& store : stores_) {
      const StoreStats stats = store->Stats();
      sum += stats.in_flight + stats.reserved_bytes + stats.writing_bytes +
             stats.output_reserved_blocks;
    }
    return sum;
  };
  EXPECT_TRUE(Eventually([&] { return held() == 0; })) << held() << " still held";
}

INSTANTIATE_TEST_SUITE_P(Planes, TierChaosTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
