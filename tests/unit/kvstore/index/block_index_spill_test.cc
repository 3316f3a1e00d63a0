// The index with a second medium: what goes to disk, comes back, is erased and restored.
#include <map>
#include <set>

#include "kernels/base/random.h"
#include "tests/unit/kvstore/index/index_testing.h"

namespace kvt {
namespace {

using absl::StatusCode;

class SpillTest : public IndexTest {
 protected:
  // 16 blocks, 32 records; pressed above 28 records, relieved at 24.
  void MakeSpilling(bool one_time = false, uint64_t disk_records = 0, uint64_t tenant_records = 0) {
    MakeSpilling(8 * record_bytes(), 4, one_time, disk_records, tenant_records);
  }
  void MakeSpilling(uint64_t slab_bytes, uint64_t slabs, bool one_time, uint64_t disk_records,
                    uint64_t tenant_records) {
    IndexOptions options;
    options.slab_bytes = slab_bytes;
    options.arena_bytes = slabs * slab_bytes;
    options.blocks_max = 1 << 20;
    options.stall_after = absl::Hours(1);
    options.boot = 7;
    options.has_disk = true;
    options.spill_one_time = one_time;
    options.disk_bytes_max = disk_records * record_bytes();
    options.tenant_bytes_max = tenant_records * record_bytes();
    options.high_watermark = 28.0 / 32;
    options.low_watermark = 24.0 / 32;
    index_ = std::make_unique<BlockIndex>(options, events_);
    Open(1);
  }
  // Block `seed` of a ticket, let go; `reused`: a second ticket used it.
  void Put(uint64_t seed, bool reused = true) {
    Store(1, Claim(1000 + seed), Names(1, seed));
    Release(1, 1000 + seed);
    if (!reused) return;
    EXPECT_EQ(Hits(1, Claim(2000 + seed), Names(1, seed)), 1);
    Release(1, 2000 + seed);
  }
  std::vector<SpillJob> Take(uint64_t records = 1000) {
    std::vector<SpillJob> jobs;
    index_->TakeSpills(now_, records * record_bytes(), &jobs);
    index_->CheckInvariants();
    return jobs;
  }
  size_t SpillAll(bool written = true) {
    size_t count = 0;
    for (auto jobs = Take(); !jobs.empty(); jobs = Take()) {
      count += jobs.size();
      for (const SpillJob& job : jobs) index_->EndSpill(now_, job.record_handle, written);
      index_->CheckInvariants();
      if (!written) break;
    }
    return count;
  }
  size_t Erasures() {
    std::vector<DiskErasure> erasures;
    index_->TakeErasures(1000, &erasures);
    return erasures.size();
  }
  FoundBlock Find(uint64_t ticket, uint64_t seed) {
    const auto found = Lookup(1, Claim(ticket), Names(1, seed));
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? (*found)[0] : FoundBlock();
  }
  PromoteBegin Begin(uint64_t ticket, uint64_t handle, Plane plane, PromoteJob* job) {
    return index_->BeginPromote(now_, SessionId(1), Live(ticket), PlaneRecordHandle(handle, plane),
                                job);
  }
  bool Promote(uint64_t ticket, uint64_t handle, Plane plane) {
    PromoteJob job;
    const PromoteBegin begin = Begin(ticket, handle, plane, &job);
    if (begin == PromoteBegin::kStarted) index_->EndPromote(now_, job.record_handle, true);
    index_->CheckInvariants();
    return begin == PromoteBegin::kStarted || begin == PromoteBegin::kResident;
  }
};

TEST_F(SpillTest, Pressure_ResidualOfColdBlocksLeavesFirstThenBaseAndStopsAtTheLowWatermark) {
  MakeSpilling();
  for (uint64_t seed = 1; seed <= 14; ++seed) Put(seed);
  EXPECT_TRUE(Take().empty()) << "28 records: not above the high watermark";
  Put(15);
  ASSERT_TRUE(index_->WantsSpill());
  // 30 to 24: six RESIDUALs, their BASEs along.
  EXPECT_EQ(SpillAll(), 12u);
  IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.used_bytes, 24u * record_bytes());
  EXPECT_EQ(stats.resident_bytes[1], 9u * record_bytes());
  EXPECT_EQ(stats.resident_bytes[0], 15u * record_bytes());
  EXPECT_EQ(stats.disk_records[0], 6u);
  EXPECT_EQ(stats.disk_records[1], 6u);
  EXPECT_TRUE(Take().empty()) << "between the watermarks nothing moves";
  // More: nothing is lost, all is found.
  for (uint64_t seed = 16; seed <= 60; ++seed) {
    Put(seed);
    SpillAll();
  }
  stats = index_->Stats();
  EXPECT_EQ(stats.blocks, 60u);
  EXPECT_EQ(stats.evicted_blocks + stats.dropped[0] + stats.dropped[1], 0u);
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    EXPECT_EQ(Find(9000, seed).presence, BlockPresence::kExact) << seed;
  }
  EXPECT_GE(stats.resident_bytes[0], stats.resident_bytes[1]);
  index_->CheckInvariants();
}

TEST_F(SpillTest, BlocksOfOneTicket_AreNotWritten) {
  MakeSpilling();
  for (uint64_t seed = 1; seed <= 8; ++seed) Put(seed);
  for (uint64_t seed = 100; seed < 107; ++seed) Put(seed, /*reused=*/false);
  for (auto jobs = Take(); !jobs.empty(); jobs = Take()) {
    for (const SpillJob& job : jobs) {
      for (uint64_t seed = 100; seed < 107; ++seed) {
        EXPECT_NE(job.key, Names(1, seed)[0].key) << "nobody asked for it twice";
      }
      index_->EndSpill(now_, job.record_handle, true);
    }
  }
  const IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.used_bytes, 24u * record_bytes());
  EXPECT_GE(stats.dropped[1], 4u);
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    EXPECT_EQ(Find(9000, seed).presence, BlockPresence::kExact) << seed;
  }
  EXPECT_EQ(Find(9000, 100).presence, BlockPresence::kBaseOnly);
}

TEST_F(SpillTest, BlocksOfOneTicket_AreWrittenWhenTheOptionSaysSo) {
  MakeSpilling(/*one_time=*/true);
  for (uint64_t seed = 1; seed <= 15; ++seed) Put(seed, /*reused=*/false);
  EXPECT_EQ(SpillAll(), 12u);
}

// Records that leave a third of each slab empty: used bytes alone would never reach the watermark.
TEST_F(SpillTest, RecordsThatDoNotFillTheirSlabs_AreSpilledUnderPressureToo) {
  MakeSpilling(3 * record_bytes() - 64, 16, /*one_time=*/true, 0, 0);
  for (uint64_t seed = 1; seed <= 15; ++seed) Put(seed);
  EXPECT_GT(SpillAll(), 0u);
}

TEST_F(SpillTest, PlaneOnDisk_AnswersOnDiskUntilPromotedUnderTheSameHandle) {
  MakeSpilling();
  for (uint64_t seed = 1; seed <= 15; ++seed) Put(seed);
  SpillAll();
  const FoundBlock found = Find(1, 1);
  ASSERT_EQ(found.presence, BlockPresence::kExact);
  EXPECT_TRUE(found.on_disk[1]);
  EXPECT_FALSE(found.on_disk[0]);
  EXPECT_EQ(found.offset[1], kNoOffset);
  EXPECT_EQ(Read(1, Claim(1), found.handle, Plane::kBase), Access::kOk);
  EXPECT_EQ(Read(1, Claim(1), found.handle, Plane::kResidual), Access::kOnDisk);
  EXPECT_EQ(Read(1, Claim(77), found.handle, Plane::kResidual), Access::kRefused);
  PromoteJob job, second;
  EXPECT_EQ(Begin(77, found.handle, Plane::kResidual, &job), PromoteBegin::kLost) << "no pin";
  ASSERT_EQ(Begin(1, found.handle, Plane::kResidual, &job), PromoteBegin::kStarted);
  EXPECT_EQ(Begin(1, found.handle, Plane::kResidual, &second), PromoteBegin::kRunning);
  EXPECT_EQ(Read(1, Claim(1), found.handle, Plane::kResidual), Access::kOnDisk) << "not yet";
  EXPECT_EQ(index_->Stats().promoting_bytes, record_bytes());
  index_->CheckInvariants();
  index_->EndPromote(now_, job.record_handle, true);
  EXPECT_EQ(Read(1, Claim(1), found.handle, Plane::kResidual), Access::kOk);
  EXPECT_EQ(Begin(1, found.handle, Plane::kResidual, &job), PromoteBegin::kResident);
  index_->CheckInvariants();
}

TEST_F(SpillTest, F6_FailedSpillOrLoad_IsAMissNeverASuccess) {
  MakeSpilling();
  for (uint64_t seed = 1; seed <= 15; ++seed) Put(seed);
  EXPECT_GT(SpillAll(/*written=*/false), 0u);
  IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.disk_records[0] + stats.disk_records[1], 0u);
  EXPECT_EQ(stats.used_bytes, 30u * record_bytes()) << "what was not written stays";
  SpillAll();
  // A RESIDUAL that cannot be read: BASE alone.
  FoundBlock found = Find(1, 1);
  PromoteJob job;
  ASSERT_EQ(Begin(1, found.handle, Plane::kResidual, &job), PromoteBegin::kStarted);
  index_->EndPromote(now_, job.record_handle, false);
  EXPECT_EQ(Read(1, Claim(1), found.handle, Plane::kResidual), Access::kLost);
  EXPECT_EQ(Begin(1, found.handle, Plane::kResidual, &job), PromoteBegin::kLost);
  EXPECT_EQ(Find(1, 1).presence, BlockPresence::kBaseOnly);
  EXPECT_EQ(Erasures(), 1u);
  index_->CheckInvariants();
  // A BASE that cannot be read: the block is gone, also for its RESIDUAL.
  for (uint64_t seed = 16; seed <= 40; ++seed) {
    Put(seed);
    SpillAll();
  }
  for (uint64_t seed = 2; seed <= 40; ++seed) {
    found = Find(2, seed);
    if (found.on_disk[0]) break;
  }
  ASSERT_TRUE(found.on_disk[0]);
  const uint64_t seed_handle = found.handle;
  ASSERT_EQ(Begin(2, seed_handle, Plane::kBase, &job), PromoteBegin::kStarted);
  index_->EndPromote(now_, job.record_handle, false);
  index_->CheckInvariants();
  EXPECT_EQ(Read(1, Claim(2), seed_handle, Plane::kBase), Access::kLost);
  EXPECT_EQ(Erasures(), 2u);
}

TEST_F(SpillTest, SpilledWhileTakenUp_StaysInMemory) {
  MakeSpilling();
  for (uint64_t seed = 1; seed <= 15; ++seed) Put(seed);
  const std::vector<SpillJob> jobs = Take();
  ASSERT_FALSE(jobs.empty());
  const FoundBlock found = Find(1, 1);
  for (const SpillJob& job : jobs) index_->EndSpill(now_, job.record_handle, true);
  index_->CheckInvariants();
  EXPECT_EQ(Read(1, Claim(1), found.handle, Plane::kResidual), Access::kOk);
}

TEST_F(SpillTest, BlockThatGoesWhileItIsMoved_LeavesNothingOnDisk) {
  MakeSpilling();
  for (uint64_t seed = 1; seed <= 15; ++seed) Put(seed);
  std::vector<SpillJob> jobs = Take();
  const uint64_t handle = Find(1, 1).handle;
  Release(1, 1);
  index_->Condemn(handle);
  index_->CheckInvariants();
  EXPECT_GT(index_->Stats().evicting_bytes, 0u);
  size_t of_it = 0;
  for (const SpillJob& job : jobs) {
    of_it += job.key == Names(1, 1)[0].key ? 1 : 0;
    index_->EndSpill(now_, job.record_handle, true);
  }
  index_->CheckInvariants();
  EXPECT_EQ(index_->Stats().evicting_bytes, 0u);
  EXPECT_EQ(Erasures(), of_it);
  EXPECT_EQ(Find(2, 1).presence, BlockPresence::kAbsent);
  // The same while it comes back.
  const FoundBlock found = Find(2, 2);
  PromoteJob job;
  ASSERT_EQ(Begin(2, found.handle, Plane::kResidual, &job), PromoteBegin::kStarted);
  index_->Condemn(found.handle);
  index_->EndPromote(now_, job.record_handle, true);
  index_->CheckInvariants();
  EXPECT_EQ(Read(1, Claim(2), found.handle, Plane::kResidual), Access::kLost);
  EXPECT_EQ(Read(1, Claim(2), found.handle, Plane::kBase), Access::kOk) << "still pinned";
}

TEST_F(SpillTest, PinnedResidual_IsSpilledWhenAReservationFoundNoRoomAndNeverDropped) {
  MakeSpilling();
  Store(1, Claim(1), Names(12, 1));  // 24 records, pinned
  Put(50);
  EXPECT_TRUE(Take().empty());
  EXPECT_EQ(Reserve(1, Claim(2), Names(6, 2)).status().code(), StatusCode::kResourceExhausted);
  EXPECT_GT(SpillAll(), 0u);
  EXPECT_EQ(index_->Stats().dropped[1], 0u);
  ASSERT_TRUE(Reserve(1, Claim(2), Names(6, 2)).ok());
  index_->CheckInvariants();
  const auto found = Lookup(1, Claim(1), Names(12, 1));
  size_t on_disk = 0;
  for (const FoundBlock& block : *found) {
    EXPECT_EQ(block.presence, BlockPresence::kExact);
    EXPECT_FALSE(block.on_disk[0]) << "BASE stays while RESIDUALs suffice";
    on_disk += block.on_disk[1] ? 1 : 0;
  }
  EXPECT_EQ(on_disk, 4u) << "what was missing, no more";
}

TEST_F(SpillTest, PromotedPlane_IsHeldForAWhile) {
  MakeSpilling();
  Store(1, Claim(1), Names(14, 1));
  EXPECT_FALSE(Reserve(1, Claim(2), Names(4, 2)).ok());
  SpillAll();
  ASSERT_TRUE(Reserve(1, Claim(2), Names(4, 2)).ok());
  const auto found = Lookup(1, Claim(1), Names(14, 1));
  const auto away = std::find_if(found->begin(), found->end(),
                                 [](const FoundBlock& block) { return block.on_disk[1]; });
  ASSERT_NE(away, found->end());
  PromoteJob job;
  EXPECT_EQ(Begin(1, away->handle, Plane::kResidual, &job), PromoteBegin::kNoRoom);
  Release(1, 2);
  ASSERT_TRUE(Promote(1, away->handle, Plane::kResidual));
  // The same pressure again does not take it at once.
  (void)Reserve(1, Claim(3), Names(4, 2));
  SpillAll();
  (void)Reserve(1, Claim(3), Names(4, 2));
  EXPECT_EQ(Read(1, Claim(1), away->handle, Plane::kResidual), Access::kOk);
}

TEST_F(SpillTest, DiskQuota_EvictsLeastRecentlyUsedFromDisk) {
  MakeSpilling(false, /*disk_records=*/20);
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Put(seed);
    SpillAll();
    const IndexStats stats = index_->Stats();
    ASSERT_LE(stats.disk_records[0] + stats.disk_records[1], 20u);
  }
  EXPECT_GT(Erasures(), 0u);
  EXPECT_EQ(Find(1, 1).presence, BlockPresence::kAbsent);
  EXPECT_EQ(Find(1, 60).presence, BlockPresence::kExact);
}

TEST_F(SpillTest, F5_TierFull_LookupsTouchAll_OversizedPutEvictsNothing) {
  MakeSpilling();
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Put(seed);
    SpillAll();
  }
  for (uint64_t seed = 1; seed <= 40; ++seed) EXPECT_EQ(Hits(1, Claim(1), Names(1, seed)), 1);
  Release(1, 1);
  const IndexStats before = index_->Stats();
  EXPECT_EQ(Reserve(1, Claim(2), Names(17, 500)).status().code(), StatusCode::kResourceExhausted);
  const IndexStats after = index_->Stats();
  EXPECT_EQ(after.blocks, before.blocks);
  EXPECT_EQ(after.used_bytes, before.used_bytes);
  EXPECT_EQ(after.disk_bytes, before.disk_bytes);
  ASSERT_TRUE(Reserve(1, Claim(2), Names(16, 500)).ok()) << "what fits finds its victims";
}

TEST_F(SpillTest, DiskThatTakesNothing_MakesRoomByDropping) {
  MakeSpilling();
  index_->SetDiskWritable(false);
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Put(seed);
    EXPECT_TRUE(Take().empty());
  }
  EXPECT_GT(index_->Stats().dropped[1], 0u);
  EXPECT_EQ(index_->Stats().disk_records[0], 0u);
  index_->SetDiskWritable(true);
  EXPECT_GT(SpillAll(), 0u);
}

TEST_F(SpillTest, Restored_IsFoundWithItsPlanesAndIncarnationsMustAgree) {
  MakeSpilling();
  RestoredBlock block;
  block.name = Names(1, 1)[0];
  block.model_fingerprint = "model";
  block.numerics_id = "numerics";
  block.geometry = SmallGeometry();
  block.incarnation = 5;
  ASSERT_TRUE(index_->RestoreBlock(block).ok());
  EXPECT_EQ(index_->RestoreBlock(block).status().code(), StatusCode::kAlreadyExists);
  EXPECT_FALSE(index_->RestoreResidual(block.name.key, 6).ok());
  EXPECT_FALSE(index_->RestoreResidual(Names(1, 2)[0].key, 5).ok());
  index_->CheckInvariants();
  EXPECT_EQ(Find(1, 1).presence, BlockPresence::kBaseOnly);
  ASSERT_TRUE(index_->RestoreResidual(block.name.key, 5).ok());
  EXPECT_FALSE(index_->RestoreResidual(block.name.key, 5).ok()) << "twice";
  const FoundBlock found = Find(1, 1);
  EXPECT_EQ(found.presence, BlockPresence::kExact);
  EXPECT_TRUE(found.on_disk[0] && found.on_disk[1]);
  ASSERT_TRUE(Promote(1, found.handle, Plane::kBase));
  ASSERT_TRUE(Promote(1, found.handle, Plane::kResidual));
  EXPECT_EQ(Read(1, Claim(1), found.handle, Plane::kBase), Access::kOk);
  // A tenant other than the one it was written for does not find it.
  EXPECT_EQ(Hits(1, Claim(3, 1, "other"), Names(1, 1)), 0);
  block.name = Names(1, 3, 0, TicketId(9))[0];
  EXPECT_FALSE(index_->RestoreBlock(block).ok()) << "private";
}

TEST_F(SpillTest, TenantBeyondItsQuota_EvictsItsOwnThenIsRefused) {
  MakeSpilling(false, 0, /*tenant_records=*/8);
  Store(1, Claim(1, 1, "a"), Names(4, 1));
  Store(1, Claim(2, 1, "b"), Names(4, 2));
  Release(1, 2);
  EXPECT_EQ(index_->BytesOfTenant("a").memory, 8u * record_bytes());
  const auto refused = Reserve(1, Claim(3, 1, "a"), Names(1, 3));
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.status().message().find("quota"), absl::string_view::npos);
  EXPECT_EQ(index_->Stats().blocks, 8u) << "nobody else pays";
  Release(1, 1);
  EXPECT_FALSE(Reserve(1, Claim(3, 1, "a"), Names(5, 3)).ok()) << "more than the quota";
  EXPECT_EQ(index_->Stats().blocks, 8u);
  ASSERT_TRUE(Reserve(1, Claim(3, 1, "a"), Names(2, 3)).ok());
  EXPECT_LE(index_->BytesOfTenant("a").memory, 8u * record_bytes());
  EXPECT_EQ(index_->BytesOfTenant("b").memory, 8u * record_bytes());
  EXPECT_EQ(Hits(1, Claim(4, 1, "b"), Names(4, 2)), 4);
  index_->CheckInvariants();
}

TEST_F(SpillTest, PurgedTenant_IsFoundNoMoreInEitherMediumAlsoWhatIsBeingWritten) {
  MakeSpilling();
  for (uint64_t seed = 1; seed <= 15; ++seed) Put(seed);
  SpillAll();
  const uint64_t pinned = Find(1, 15).handle;
  const auto writing = Reserve(1, Claim(2), Names(1, 50));
  ASSERT_TRUE(writing.ok());
  Store(1, Claim(3, 1, "b"), Names(1, 60));
  Release(1, 3);
  EXPECT_EQ(index_->PurgeTenant("nobody"), 0u);
  EXPECT_EQ(index_->PurgeTenant(""), 16u);
  index_->CheckInvariants();
  EXPECT_EQ(Read(1, Claim(1), pinned), Access::kOk) << "pinned: until it is let go";
  Write(1, Claim(2), (*writing)[0].handle);
  index_->CheckInvariants();
  for (uint64_t seed = 1; seed <= 15; ++seed) {
    EXPECT_EQ(Find(9, seed).presence, BlockPresence::kAbsent);
  }
  EXPECT_EQ(Find(9, 50).presence, BlockPresence::kAbsent);
  EXPECT_EQ(Erasures(), 12u);
  Release(1, 1);
  Release(1, 2);
  EXPECT_EQ(index_->BytesOfTenant("").memory + index_->BytesOfTenant("").disk, 0u);
  EXPECT_EQ(Hits(1, Claim(4, 1, "b"), Names(1, 60)), 1);
}

}  // namespace
}  // namespace kvt
