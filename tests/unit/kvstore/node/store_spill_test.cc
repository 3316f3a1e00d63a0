// A store node with a second medium: what goes to disk and comes back, failures, crashes, purge.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "kvstore/node/spill_meta.h"
#include "tests/support/spilling_store.h"

namespace kvt {
namespace {

using Outcome = PromoteReply::Outcome;

class StoreSpillTest : public testing::Test {
 protected:
  void Start(SpillingOptions options = {}) {
    store_.reset();
    store_ = std::make_unique<SpillingStore>(medium_, tickets_, clock_, options);
  }
  static BlockName Name(int seed, const std::string& tenant = "") {
    return TestNames(1, 1000 * seed, tenant)[0];
  }
  SpillKey DiskKey(const BlockKey& key, Plane plane) {
    return SpillKey{key.bytes, plane == Plane::kBase ? SpillPart::kBase : SpillPart::kResidual};
  }
  void PutMany(int first, int last) {
    for (int seed = first; seed <= last; ++seed) {
      ASSERT_TRUE(store_->Put(seed, Name(seed)).ok()) << seed;
      store_->SpillAll();
      ExpectBytesSum(store_->node().StatsNow());
    }
  }
  StoreStats Stats() { return store_->node().StatsNow(); }

  ManualClock clock_;
  TicketMaker tickets_;
  std::shared_ptr<MemorySpillMedium> medium_ = std::make_shared<MemorySpillMedium>();
  std::unique_ptr<SpillingStore> store_;
};

TEST_F(StoreSpillTest, FourTimesTheMemory_ComesBackBitForBitAlsoAfterARestart) {
  Start();
  PutMany(1, 64);
  const StoreStats stats = Stats();
  EXPECT_EQ(stats.blocks, 64u);
  EXPECT_GT(stats.disk_records[0], 40u);
  EXPECT_EQ(stats.evicted_blocks, 0u);
  EXPECT_EQ(stats.disk_used_bytes > 0, true);
  EXPECT_GT(stats.index_bytes, 64u * 100);
  for (int seed = 1; seed <= 64; ++seed) EXPECT_EQ(store_->Readable(900, Name(seed)), 2) << seed;
  EXPECT_GT(Stats().promoted[0], 0u);
  Start();
  ASSERT_TRUE(store_->attached().ok()) << store_->attached();
  EXPECT_EQ(Stats().used_bytes, 0u);
  EXPECT_GT(Stats().blocks, 40u);
  int found = 0;
  for (int seed = 1; seed <= 64; ++seed) {
    const int readable = store_->Readable(900, Name(seed));
    EXPECT_NE(readable, 1) << "planes go to disk together";
    found += readable == 2 ? 1 : 0;
  }
  EXPECT_EQ(found, static_cast<int>(Stats().blocks));
}

TEST_F(StoreSpillTest, Lookup_GivesChecksumsOfPlanesOnDiskAndSaysWhereTheyAre) {
  Start();
  PutMany(1, 40);
  const LookupReply::Block found = store_->Look(900, Name(1));
  ASSERT_EQ(found.presence, BlockPresence::kExact);
  EXPECT_TRUE(found.place.base_on_disk && found.place.residual_on_disk);
  EXPECT_EQ(found.place.base_checksums, TestChecksums(Name(1).key, Plane::kBase));
  EXPECT_EQ(found.place.residual_checksums, TestChecksums(Name(1).key, Plane::kResidual));
  const uint64_t record = PlaneRecordHandle(found.place.handle, Plane::kBase);
  EXPECT_EQ(store_->Pull(900, Name(1).key, record), PieceStatus::kOnDisk);
  EXPECT_EQ(store_->Pull(901, Name(1).key, record), PieceStatus::kRefused);
  EXPECT_EQ(store_->Promote(901, record), Outcome::kLost);
  EXPECT_EQ(store_->Promote(900, record), Outcome::kResident);
  EXPECT_EQ(store_->Pull(900, Name(1).key, record), PieceStatus::kOk);
}

TEST_F(StoreSpillTest, Promote_WaitsForAReaderAndSaysWhatItRead) {
  Start();
  PutMany(1, 40);
  const uint64_t handle = store_->Look(900, Name(1)).place.handle;
  std::thread reader([this] {
    const absl::Time give_up = RealClock::Get().Now() + absl::Seconds(30);
    while (!store_->node().PromoteRound() && RealClock::Get().Now() < give_up) {
      store_->node().WaitForPromote(absl::Milliseconds(50));
    }
  });
  const auto reply = store_->node().Promote({store_->session(),
                                             Ref(900),
                                             {PlaneRecordHandle(handle, Plane::kBase),
                                              PlaneRecordHandle(handle, Plane::kResidual), 12345},
                                             absl::Seconds(5)});
  reader.join();
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->outcomes, (std::vector{Outcome::kResident, Outcome::kResident, Outcome::kLost}));
  EXPECT_EQ(reply->bytes_from_disk, 2u * TestGeometry().RecordBytes());
}

TEST_F(StoreSpillTest, F6_FailedSpill_ServesFromMemorySaysSoAndTriesAgainLater) {
  Start();
  medium_->SetWriteFailure(absl::UnavailableError("spill: I/O error"));
  PutMany(1, 40);
  StoreStats stats = Stats();
  EXPECT_EQ(stats.disk_records[0] + stats.disk_records[1], 0u);
  EXPECT_NE(stats.disk_failing.find("I/O error"), std::string::npos);
  EXPECT_EQ(stats.spill_failures, 1u) << "backs off";
  EXPECT_EQ(store_->Readable(900, Name(40)), 2);
  clock_.Advance(kSpillRetryMin + absl::Milliseconds(1));
  PutMany(41, 50);
  EXPECT_EQ(Stats().spill_failures, 2u);
  clock_.Advance(kSpillRetryMin + absl::Milliseconds(1));
  PutMany(51, 52);
  EXPECT_EQ(Stats().spill_failures, 2u) << "ever later";
  medium_->SetWriteFailure(absl::OkStatus());
  clock_.Advance(kSpillRetryMax);
  PutMany(53, 80);
  stats = Stats();
  EXPECT_EQ(stats.disk_failing, "");
  EXPECT_GT(stats.disk_records[0], 0u);
}

TEST_F(StoreSpillTest, F6_FailedOrCorruptLoad_IsAMissAndNeverAsked) {
  Start();
  PutMany(1, 60);
  ASSERT_TRUE(medium_->Damage(DiskKey(Name(1).key, Plane::kBase)));
  LookupReply::Block found = store_->Look(900, Name(1));
  EXPECT_EQ(store_->Promote(900, PlaneRecordHandle(found.place.handle, Plane::kBase)),
            Outcome::kLost);
  EXPECT_EQ(store_->Look(901, Name(1)).presence, BlockPresence::kAbsent);
  medium_->SetReadFailure(absl::UnavailableError("spill: I/O error"));
  found = store_->Look(900, Name(2));
  EXPECT_EQ(store_->Promote(900, PlaneRecordHandle(found.place.handle, Plane::kResidual)),
            Outcome::kLost);
  EXPECT_EQ(store_->Look(901, Name(2)).presence, BlockPresence::kBaseOnly);
  EXPECT_EQ(Stats().promote_failures, 2u);
  ExpectBytesSum(Stats());
}

TEST_F(StoreSpillTest, F6_TransientReadError_IsReadAgainAndTheRecordStays) {
  Start();
  PutMany(1, 60);
  LookupReply::Block found = store_->Look(900, Name(1));
  const uint64_t base = PlaneRecordHandle(found.place.handle, Plane::kBase);
  medium_->FailReads(kPromoteReadsMax - 1, absl::UnavailableError("spill: I/O error"));
  EXPECT_EQ(store_->Promote(900, base), Outcome::kResident);
  EXPECT_EQ(store_->Pull(900, Name(1).key, base), PieceStatus::kOk);
  EXPECT_EQ(Stats().promote_retries, uint64_t{kPromoteReadsMax} - 1);
  EXPECT_EQ(Stats().promote_failures, 0u);
  // As often as it is tried: given up, and its space is free again.
  medium_->FailReads(kPromoteReadsMax, absl::UnavailableError("spill: I/O error"));
  found = store_->Look(900, Name(2));
  EXPECT_EQ(store_->Promote(900, PlaneRecordHandle(found.place.handle, Plane::kBase)),
            Outcome::kLost);
  EXPECT_EQ(Stats().promote_failures, 1u);
  ExpectBytesSum(Stats());
}

// Blocks that two tickets used, written faster than the disk takes them: a writer of its own, and a
// disk that needs a while for each batch.
class StoreBurstTest : public StoreSpillTest {
 protected:
  static constexpr int kBlocks = 96;  // six times the memory

  // Puts kBlocks blocks as fast as the store lets, each used by a second ticket.
  void Burst(absl::Duration spill_wait, absl::Duration disk_delay) {
    store_ = std::make_unique<SpillingStore>(
        medium_, tickets_, RealClock::Get(),
        SpillingOptions{.one_time = false, .spill_wait = spill_wait});
    medium_->SetDelay(disk_delay);
    std::atomic<bool> done{false};
    std::thread writer([&] {
      while (!done) {
        if (!store_->node().SpillRound()) store_->node().WaitForSpill(absl::Milliseconds(20));
      }
    });
    for (int seed = 1; seed <= kBlocks; ++seed) {
      PutReused(seed);
    }
    done = true;
    medium_->SetDelay(absl::ZeroDuration());
    writer.join();
    ExpectBytesSum(Stats());
  }
  // The second ticket finds it while the first holds it: it is never a block that one ticket used and
  // the writer may drop.
  void PutReused(int seed) {
    const auto ticket = static_cast<uint64_t>(seed);
    const auto reserved =
        store_->node().Reserve({store_->session(), tickets_.Make(ticket), {Name(seed)}, 0, {}});
    ASSERT_TRUE(reserved.ok()) << reserved.status();
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      store_->Push(ticket, Name(seed).key,
                   PlaneRecordHandle(reserved->blocks[0].place.handle, plane));
    }
    EXPECT_EQ(store_->Look(1000 + ticket, Name(seed)).presence, BlockPresence::kExact);
    for (const uint64_t holder : {ticket, 1000 + ticket}) {
      EXPECT_TRUE(store_->node().Release({store_->session(), Ref(holder)}).ok());
    }
  }
  uint64_t Dropped() { return Stats().dropped[0] + Stats().dropped[1] + Stats().evicted_blocks; }
};

TEST_F(StoreBurstTest, BurstFasterThanTheDisk_WaitsAndLosesNoReusedBlock) {
  Burst(/*spill_wait=*/absl::Seconds(30), /*disk_delay=*/absl::Milliseconds(3));
  EXPECT_EQ(Dropped(), 0u);
  EXPECT_EQ(Stats().refused, 0u) << "a wait is no refusal";
  EXPECT_GT(Stats().spill_waits, 0u);
  for (int seed = 1; seed <= kBlocks; ++seed) {
    // Both planes, in memory or on disk; nothing is promoted, which would need room.
    EXPECT_EQ(store_->Look(2000, Name(seed)).presence, BlockPresence::kExact) << seed;
  }
}

TEST_F(StoreBurstTest, DiskThatHangs_CostsTheWaitAndThenColdBlocksGo) {
  const absl::Time began = RealClock::Get().Now();
  Burst(/*spill_wait=*/absl::Milliseconds(20), /*disk_delay=*/absl::Hours(1));
  EXPECT_LT(RealClock::Get().Now() - began, absl::Seconds(30));
  EXPECT_GT(Dropped(), 0u);
  EXPECT_EQ(store_->Readable(3000, Name(kBlocks)), 2);
}

TEST_F(StoreBurstTest, AgedReservation_DoesNotWait) {
  Start({.one_time = false, .spill_wait = absl::Hours(1)});
  for (int seed = 1; seed <= 16; ++seed) {
    ASSERT_TRUE(store_->Put(seed, Name(seed)).ok()) << seed;
    (void)store_->Look(1000 + seed, Name(seed));
    ASSERT_TRUE(store_->node().Release({store_->session(), Ref(1000 + seed)}).ok());
  }
  // Nobody spills: a fresh one would wait for ever.
  const auto aged = store_->node().Reserve(
      {store_->session(), tickets_.Make(77), {Name(77)}, 0, absl::Milliseconds(600)});
  ASSERT_TRUE(aged.ok()) << aged.status();
  EXPECT_FALSE(aged->pending);
  EXPECT_EQ(Stats().spill_waits, 0u);
}

TEST_F(StoreSpillTest, DiskFull_IsSaidAndNothingInMemoryIsHurt) {
  medium_->SetQuota(20 * TestGeometry().RecordBytes());
  Start();
  PutMany(1, 60);
  EXPECT_NE(Stats().disk_failing, "");
  EXPECT_EQ(store_->Readable(900, Name(60)), 2);
  ExpectBytesSum(Stats());
}

TEST_F(StoreSpillTest, DiskFilledByOthers_KeepsWhatFitsServesAndComesBackWithTheSpace) {
  const uint64_t record = TestGeometry().RecordBytes();
  medium_->SetFreeBytes(40 * record);
  Start();
  PutMany(1, 60);
  EXPECT_NE(Stats().disk_failing, "");
  EXPECT_NE(store_->node().Condition(), "");
  const uint64_t limit = Stats().disk_limit_bytes;
  EXPECT_GT(limit, 0u);
  EXPECT_LT(limit, 40 * record);
  EXPECT_EQ(store_->Readable(900, Name(60)), 2);
  // From the next try on the newest take the place of the oldest.
  for (int seed = 61; seed <= 120; ++seed) {
    clock_.Advance(absl::Minutes(2));
    PutMany(seed, seed);
  }
  EXPECT_EQ(Stats().disk_failing, "");
  EXPECT_GT(Stats().disk_records[0], 5u);
  EXPECT_LE(Stats().disk_bytes[0] + Stats().disk_bytes[1], Stats().disk_limit_bytes);
  EXPECT_NE(store_->node().Condition().find("full"), std::string::npos);
  EXPECT_EQ(store_->Readable(900, Name(1)), 0) << "the oldest went";
  EXPECT_EQ(store_->Readable(900, Name(120)), 2);
  EXPECT_EQ(store_->Readable(900, Name(110)), 2);
  const uint64_t before = Stats().disk_records[0];
  medium_->SetFreeBytes(uint64_t{1} << 40);
  clock_.Advance(kDiskLimitCheck);
  PutMany(121, 180);
  EXPECT_EQ(Stats().disk_limit_bytes, 0u);
  EXPECT_EQ(store_->node().Condition(), "");
  EXPECT_GT(Stats().disk_records[0], before + 30);
  ExpectBytesSum(Stats());
}

TEST_F(StoreSpillTest, TenantsDiskQuota_ItsOldestGoForItsNewestAndOthersStay) {
  const uint64_t quota = 20 * TestGeometry().RecordBytes();
  Start({.tenant_disk_bytes_max = quota});
  for (int seed = 1; seed <= 8; ++seed) {
    ASSERT_TRUE(store_->Put(seed, Name(seed, "b"), "b").ok());
    store_->SpillAll();
  }
  for (int seed = 101; seed <= 160; ++seed) {
    ASSERT_TRUE(store_->Put(seed, Name(seed, "a"), "a").ok());
    store_->SpillAll();
  }
  const auto stats = store_->node().Stats();
  ASSERT_TRUE(stats.ok());
  ASSERT_EQ(stats->tenants.size(), 2u);
  EXPECT_EQ(stats->tenants[0].tenant, "a") << "who holds most comes first";
  EXPECT_LE(stats->tenants[0].disk_bytes, quota);
  EXPECT_GT(stats->tenants[0].disk_bytes, quota / 2);
  EXPECT_GT(stats->tenants[0].memory_bytes, 0u);
  EXPECT_GT(stats->tenants[1].disk_bytes, 0u);
  EXPECT_EQ(stats->tenants[0].memory_bytes + stats->tenants[1].memory_bytes, stats->used_bytes);
  EXPECT_EQ(stats->tenants[0].disk_bytes + stats->tenants[1].disk_bytes,
            stats->disk_bytes[0] + stats->disk_bytes[1]);
  for (int seed = 1; seed <= 8; ++seed) {
    EXPECT_EQ(store_->Look(900 + seed, Name(seed, "b"), "b").presence, BlockPresence::kExact);
  }
  EXPECT_EQ(store_->Look(990, Name(101, "a"), "a").presence, BlockPresence::kAbsent);
  EXPECT_EQ(store_->Look(990, Name(160, "a"), "a").presence, BlockPresence::kExact);
  ExpectBytesSum(Stats());
}

TEST_F(StoreSpillTest, Quota_EvictsLeastRecentlyUsedFromDisk) {
  Start({.disk_bytes_max = 40 * TestGeometry().RecordBytes()});
  PutMany(1, 80);
  const StoreStats stats = Stats();
  EXPECT_LE(stats.disk_bytes[0] + stats.disk_bytes[1], 40u * TestGeometry().RecordBytes());
  EXPECT_EQ(stats.disk_failing, "");
  EXPECT_EQ(store_->Readable(900, Name(1)), 0);
  EXPECT_FALSE(medium_->Holds(DiskKey(Name(1).key, Plane::kBase)));
  EXPECT_EQ(store_->Readable(900, Name(79)), 2);
}

TEST_F(StoreSpillTest, F7_CrashAtEachStep_IndexEqualsReadableDataAfterARestart) {
  constexpr int kBlocks = 28;
  uint64_t steps = 0;
  for (const Unsynced unsynced : {Unsynced::kLost, Unsynced::kKept, Unsynced::kTorn}) {
    for (uint64_t step = 0;; ++step) {
      medium_ = std::make_shared<MemorySpillMedium>();
      Start();
      medium_->CrashAtStep(step, unsynced);
      // Spills, promotions, and erasures by a purge.
      for (int seed = 1; seed <= kBlocks; ++seed) {
        ASSERT_TRUE(store_->Put(seed, Name(seed)).ok());
        store_->SpillAll();
        if (seed % 5 == 0) (void)store_->Readable(500, Name(seed / 5));
        if (seed == 20) {
          (void)store_->Put(600, Name(600, "b"), "b");
          (void)store_->node().PurgeTenant({"b", absl::ZeroDuration()});
        }
      }
      const bool crashed = medium_->crashed();
      ++steps;
      medium_->ClearFaults();
      Start();
      SCOPED_TRACE(testing::Message() << "step " << step << " way " << static_cast<int>(unsynced));
      ASSERT_TRUE(store_->attached().ok()) << store_->attached();
      store_->SpillAll();  // erases what was given up
      const StoreStats stats = Stats();
      uint64_t on_disk = 0, readable = 0;
      for (int seed = 1; seed <= kBlocks; ++seed) {
        for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
          on_disk += medium_->Holds(DiskKey(Name(seed).key, plane)) ? 1 : 0;
        }
      }
      EXPECT_EQ(stats.disk_records[0] + stats.disk_records[1], on_disk);
      EXPECT_EQ(stats.used_bytes, 0u);
      for (int seed = 1; seed <= kBlocks; ++seed) readable += store_->Readable(900, Name(seed));
      EXPECT_EQ(readable, on_disk) << "what the index says is there can be read";
      ExpectBytesSum(Stats());
      if (HasFailure()) return;
      if (!crashed) break;
    }
  }
  EXPECT_GT(steps, 100u);
}

TEST_F(StoreSpillTest, PurgedTenant_IsOffMemoryAndMedium) {
  Start();
  for (int seed = 1; seed <= 40; ++seed) {
    const std::string tenant = seed % 2 == 0 ? "a" : "b";
    ASSERT_TRUE(store_->Put(seed, Name(seed, tenant), tenant).ok());
    store_->SpillAll();
  }
  const std::vector<std::byte> bytes = TestBytes(Name(2, "a").key, Plane::kBase);
  const absl::string_view pattern(reinterpret_cast<const char*>(bytes.data()), 64);
  ASSERT_TRUE(medium_->ContainsBytes(pattern));
  const auto asked = store_->node().PurgeTenant({"a", absl::ZeroDuration()});
  ASSERT_TRUE(asked.ok());
  EXPECT_FALSE(asked->disk_reclaimed) << "nobody made a round yet";
  store_->SpillAll();
  EXPECT_FALSE(medium_->ContainsBytes(pattern));
  for (int seed = 1; seed <= 40; ++seed) {
    const std::string tenant = seed % 2 == 0 ? "a" : "b";
    EXPECT_EQ(store_->Look(900 + seed, Name(seed, tenant), tenant).presence,
              seed % 2 == 0 ? BlockPresence::kAbsent : BlockPresence::kExact)
        << seed;
  }
  EXPECT_EQ(asked->memory_bytes, 0u);
}

TEST(SpillMeta, BytesOfAnotherVersionOrCutOff_AreDataLoss) {
  SpillMeta meta;
  meta.incarnation = 7;
  meta.checksums = {1, 2, 3};
  meta.block.name = TestNames(1, 5)[0];
  meta.block.geometry = TestGeometry();
  meta.block.model_fingerprint = "f";
  meta.block.tenant = "t";
  const std::string bytes = EncodeSpillMeta(meta);
  const absl::StatusOr<SpillMeta> back = DecodeSpillMeta(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->incarnation, 7u);
  EXPECT_EQ(back->block.incarnation, 7u);
  EXPECT_EQ(back->checksums, meta.checksums);
  EXPECT_EQ(back->block.name.tokens, meta.block.name.tokens);
  EXPECT_EQ(back->block.name.parent, meta.block.name.parent);
  EXPECT_EQ(back->block.geometry, TestGeometry());
  EXPECT_EQ(back->block.tenant, "t");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeSpillMeta(absl::string_view(bytes).substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(DecodeSpillMeta(bytes + "x").ok());
  std::string other = bytes;
  other[0] = 2;
  EXPECT_EQ(DecodeSpillMeta(other).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace kvt
