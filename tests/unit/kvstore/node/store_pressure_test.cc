// Memory of a tenth of the working set, mixed tenants, the spill threads running: only typed
// refusals, figures that equal the allocator's truth at every sample, memory of the process flat,
// no foreign byte. 15 s; KVT_PRESSURE_SECONDS=600 for the long run.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "kernels/base/random.h"
#include "tests/support/spilling_store.h"

namespace kvt {
namespace {

constexpr int kMemoryBlocks = 64;
constexpr int kWorkingSet = 10 * kMemoryBlocks;
constexpr int kTenants = 4;
constexpr absl::Duration kWarmMax = absl::Seconds(40);

uint64_t ResidentBytes() {
  std::ifstream in("/proc/self/statm");
  uint64_t size = 0, resident = 0;
  in >> size >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

std::string Tenant(int seed) { return std::string(1, static_cast<char>('a' + seed % kTenants)); }

struct Tally {
  std::atomic<uint64_t> puts{0}, refused{0}, hits{0}, from_disk{0}, no_room{0}, lost{0};
};

// Requests of one worker thread until `stop`.
void Work(SpillingStore& store, const std::vector<BlockName>& names, const TicketMaker& tickets,
          uint64_t first_ticket, const std::atomic<bool>& stop, Tally& tally) {
  Random random(first_ticket);
  for (uint64_t ticket = first_ticket; !stop.load(); ++ticket) {
    // Some blocks are asked for far more often than others.
    const uint64_t range = random.Below(3) == 0 ? kWorkingSet : kWorkingSet / 8;
    const auto seed = static_cast<int>(random.Below(range));
    const BlockName& name = names[seed];
    const auto found =
        store.node().Lookup({store.session(), tickets.Make(ticket, 1, Tenant(seed)), {name}});
    ASSERT_TRUE(found.ok()) << found.status();
    if (found->blocks[0].presence == BlockPresence::kAbsent) {
      const absl::Status put = store.Put(ticket, name, Tenant(seed));
      if (put.ok()) {
        ++tally.puts;
      } else {
        ASSERT_EQ(put.code(), absl::StatusCode::kResourceExhausted) << put;
        ++tally.refused;
      }
    } else {
      const uint64_t record = PlaneRecordHandle(found->blocks[0].place.handle, Plane::kBase);
      PieceStatus status = store.Pull(ticket, name.key, record);
      if (status == PieceStatus::kOnDisk) {
        const auto reply =
            store.node().Promote({store.session(), Ref(ticket), {record}, absl::Seconds(10)});
        ASSERT_TRUE(reply.ok()) << reply.status();
        ASSERT_NE(reply->outcomes[0], PromoteReply::Outcome::kLate);
        if (reply->outcomes[0] == PromoteReply::Outcome::kNoRoom) ++tally.no_room;
        if (reply->outcomes[0] == PromoteReply::Outcome::kLost) ++tally.lost;
        if (reply->outcomes[0] == PromoteReply::Outcome::kResident) ++tally.from_disk;
        status = store.Pull(ticket, name.key, record);
      }
      if (status == PieceStatus::kOk) ++tally.hits;
    }
    ASSERT_TRUE(store.node().Release({store.session(), Ref(ticket)}).ok());
  }
}

TEST(StorePressure, F17_ATenthOfTheWorkingSet_TypedRefusalsTrueFiguresFlatMemory) {
  const char* const longer = std::getenv("KVT_PRESSURE_SECONDS");
  const absl::Duration length = absl::Seconds(longer != nullptr ? std::atoi(longer) : 15);
  const TicketMaker tickets;
  // Keeps the bytes of erased records as a disk does, up to its quota.
  auto medium = std::make_shared<MemorySpillMedium>(uint64_t{kWorkingSet} * 3 / 2 *
                                                    TestGeometry().RecordBytes());
  SpillingStore store(medium, tickets, RealClock::Get(),
                      {.blocks = kMemoryBlocks,
                       .one_time = false,
                       .disk_bytes_max = uint64_t{kWorkingSet} * TestGeometry().RecordBytes(),
                       .tenant_bytes_max = uint64_t{kMemoryBlocks} * TestGeometry().RecordBytes()});
  std::vector<BlockName> names;
  for (int seed = 0; seed < kWorkingSet; ++seed) {
    names.push_back(TestNames(1, 1000 * seed, Tenant(seed))[0]);
  }
  std::atomic<bool> stop{false};
  std::atomic<bool> stop_disk{false};  // after the workers, whose promotions it serves
  Tally tally;
  std::vector<std::thread> threads;
  std::vector<std::thread> workers;
  threads.emplace_back([&] {
    while (!stop_disk.load()) {
      if (!store.node().SpillRound()) store.node().WaitForSpill(absl::Milliseconds(20));
    }
  });
  threads.emplace_back([&] {
    while (!stop_disk.load()) {
      if (!store.node().PromoteRound()) store.node().WaitForPromote(absl::Milliseconds(20));
    }
  });
  for (uint64_t worker = 1; worker <= 2; ++worker) {
    workers.emplace_back(
        [&, worker] { Work(store, names, tickets, worker * 1'000'000'000, stop, tally); });
  }
  // Warm, then flat.
  const absl::Time begin = RealClock::Get().Now();
  uint64_t warm = 0, most = 0;
  uint64_t samples = 0;
  Mutex mu;
  CondVar pause;  // nobody signals it: between two samples
  absl::Time warm_end = begin + length / 3;
  bool is_warm = false;
  while ((!is_warm || RealClock::Get().Now() < warm_end + 2 * length / 3) &&
         !testing::Test::HasFailure()) {
    {
      MutexLock lock(mu);
      pause.WaitFor(mu, absl::Milliseconds(50));
    }
    store.node().Tick();
    ExpectBytesSum(store.node().StatsNow());
    ++samples;
    const uint64_t now = ResidentBytes();
    if (is_warm) {
      most = std::max(most, now);
      continue;
    }
    warm = std::max(warm, now);
    // The cache of checked tickets, full, is most of what there is to warm.
    const bool full = tally.puts + tally.refused + tally.hits > 2 * kCheckedTicketsMax;
    const absl::Time at = RealClock::Get().Now();
    is_warm = at >= warm_end && (full || at >= begin + kWarmMax);
    if (is_warm) warm_end = at;
  }
  stop.store(true);
  for (std::thread& thread : workers) thread.join();
  stop_disk.store(true);
  for (std::thread& thread : threads) thread.join();
  const StoreStats stats = store.node().StatsNow();
  ExpectBytesSum(stats);
  EXPECT_EQ(stats.pins + stats.tickets + stats.in_flight, 0u);
  EXPECT_GT(samples, 20u);
  EXPECT_GT(tally.puts.load(), 100u);
  EXPECT_GT(tally.from_disk.load(), 10u);
  EXPECT_GT(stats.spilled[1], 10u);
  EXPECT_EQ(stats.disk_failing, "");
  EXPECT_EQ(stats.promote_failures, 0u);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which keep what was freed
  EXPECT_LT(most, warm + (8u << 20)) << "the process grows";
#endif
  std::printf(
      "puts %lu, refused %lu, hits %lu, from disk %lu, no room %lu, lost %lu; "
      "resident %.1f MiB warm, %.1f MiB at most\n",
      tally.puts.load(), tally.refused.load(), tally.hits.load(), tally.from_disk.load(),
      tally.no_room.load(), tally.lost.load(), static_cast<double>(warm) / (1 << 20),
      static_cast<double>(most) / (1 << 20));
}

}  // namespace
}  // namespace kvt
