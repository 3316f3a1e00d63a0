// Digests are given up after KV of any age while they hold no more than their share, before it beyond
// that (eviction_plan.h). The sessions of digests open first everywhere, so that their class is the
// first that a search meets, and the digests are the oldest blocks.
#include "kernels/base/random.h"
#include "kvstore/index/digest_geometry.h"
#include "kvstore/index/limits.h"
#include "tests/unit/kvstore/index/index_testing.h"

namespace kvt {
namespace {

constexpr uint64_t kDigests = 1;  // sessions
constexpr uint64_t kKv = 2;
constexpr int kDigestSeed = 100000;  // their keys differ from those of KV

class DigestOrderTest : public IndexTest {
 protected:
  static Geometry Digest() { return DigestGeometry(1); }  // a quarter of a record of KV
  static uint32_t digest_bytes() { return Digest().RecordBytes(); }

  // Slabs of four blocks of KV or sixteen of digests.
  IndexOptions Options(uint64_t slabs) {
    IndexOptions options;
    options.slab_bytes = 8 * record_bytes();
    options.arena_bytes = slabs * options.slab_bytes;
    options.blocks_max = 1 << 20;
    options.stall_after = absl::Hours(1);
    return options;
  }
  void Make(const IndexOptions& options) {
    events_ = WatchedEvents();
    index_ = std::make_unique<BlockIndex>(options, events_);
    ASSERT_TRUE(index_->OpenSession(now_, Spec(kDigests, "w/digest", 1, Digest())).ok());
    Open(kKv);
  }
  // Writes what was reserved.
  void WriteAll(uint64_t session, const TicketClaim& claim, uint32_t bytes,
                const std::vector<ReservedBlock>& reserved) {
    for (const ReservedBlock& block : reserved) {
      if (block.already_sealed) continue;
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        const RecordRange range = Range(claim, block.handle, plane, 0, bytes);
        uint64_t offset = 0;
        ASSERT_EQ(index_->BeginWrite(SessionId(session), range, &offset), Access::kOk);
        EXPECT_TRUE(index_->EndWrite(range, true));
      }
    }
  }
  // One block that two tickets used, both gone. False: refused.
  bool Put(uint64_t session, int seed, absl::string_view tenant = "") {
    const TicketClaim claim = Claim(next_ticket_++, 1, tenant);
    const auto reserved = Reserve(session, claim, Names(1, seed));
    if (!reserved.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(reserved.status())) << reserved.status();
      return false;
    }
    WriteAll(session, claim, session == kDigests ? digest_bytes() : record_bytes(), *reserved);
    Release(session, claim.id.value());
    EXPECT_EQ(Hits(session, Claim(next_ticket_, 1, tenant), Names(1, seed)), 1);
    Release(session, next_ticket_++);
    return true;
  }
  bool PutDigest(int seed, absl::string_view tenant = "") {
    return Put(kDigests, kDigestSeed + seed, tenant);
  }
  bool PutKv(int seed, absl::string_view tenant = "") { return Put(kKv, seed, tenant); }
  // Of seeds [first, first + count), by a ticket that goes again.
  int Found(uint64_t session, int first, int count, absl::string_view tenant = "") {
    int hits = 0;
    for (int seed = first; seed < first + count; ++seed) {
      const int at = session == kDigests ? kDigestSeed + seed : seed;
      const TicketClaim claim = Claim(next_ticket_++, 1, tenant);
      hits += Hits(session, claim, Names(1, at));
      Release(session, claim.id.value());
    }
    return hits;
  }
  // Rounds of the disk's writer; returns the records of each kind written.
  struct Spilled {
    int digests = 0;
    int kv = 0;
  };
  Spilled Spill(uint64_t bytes_max = 1 << 30) {
    Spilled spilled;
    std::vector<SpillJob> jobs;
    index_->TakeSpills(now_, bytes_max, &jobs);
    for (const SpillJob& job : jobs) {
      ++(job.bytes == digest_bytes() ? spilled.digests : spilled.kv);
      index_->EndSpill(now_, job.record_handle, true);
    }
    index_->CheckInvariants();
    return spilled;
  }
  Spilled SpillAll() {
    Spilled all;
    for (Spilled round = Spill(); round.kv + round.digests > 0; round = Spill()) {
      all.kv += round.kv;
      all.digests += round.digests;
    }
    return all;
  }
  uint64_t next_ticket_ = 1;
};

TEST_F(DigestOrderTest, FullArena_DigestsTakeSlabsOfKvUpToTheirShareThenTheirOwnOldest) {
  Make(Options(16));  // their share: two slabs, 32 digests
  for (int seed = 1; seed <= 64; ++seed) ASSERT_TRUE(PutKv(seed));
  for (int seed = 1; seed <= 100; ++seed) ASSERT_TRUE(PutDigest(seed));
  index_->CheckInvariants();
  EXPECT_EQ(Found(kDigests, 69, 32), 32) << "the last ones";
  EXPECT_EQ(Found(kDigests, 1, 68), 0);
  EXPECT_EQ(Found(kKv, 9, 56), 56) << "two slabs went, the coldest";
  EXPECT_EQ(Found(kKv, 1, 8), 0);
  // KV comes and goes for ever: the digests stay, though they are older than all of it.
  for (int seed = 1000; seed <= 1500; ++seed) ASSERT_TRUE(PutKv(seed));
  EXPECT_EQ(Found(kDigests, 69, 32), 32);
}

TEST_F(DigestOrderTest, SlabsForAnotherModel_ComeFromKvBeforeDigests) {
  Make(Options(16));
  for (int seed = 1; seed <= 32; ++seed) ASSERT_TRUE(PutDigest(seed));
  for (int seed = 1; seed <= 56; ++seed) ASSERT_TRUE(PutKv(seed));
  SessionSpec wide = Spec(3, "wide");
  wide.geometry.layers = 4;  // two blocks a slab
  ASSERT_TRUE(index_->OpenSession(now_, wide).ok());
  const auto reserved = Reserve(3, Claim(5000), Names(27, 5000));
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  EXPECT_EQ(Found(kKv, 1, 56), 0);
  EXPECT_EQ(Found(kDigests, 1, 32), 32);
  // When there is nothing else they go, too.
  ASSERT_TRUE(Reserve(3, Claim(5001), Names(4, 5001)).ok());
  EXPECT_EQ(Found(kDigests, 1, 32), 0);
  index_->CheckInvariants();
}

TEST_F(DigestOrderTest, DigestsBeyondTheirShare_GoBeforeKv) {
  Make(Options(16));
  for (int seed = 1; seed <= 64; ++seed) ASSERT_TRUE(PutDigest(seed));  // four empty slabs
  for (int seed = 1; seed <= 48; ++seed) ASSERT_TRUE(PutKv(seed));
  for (int seed = 49; seed <= 56; ++seed) ASSERT_TRUE(PutKv(seed));
  EXPECT_EQ(Found(kKv, 1, 56), 56);
  EXPECT_EQ(Found(kDigests, 1, 32), 0) << "the coldest";
  EXPECT_EQ(Found(kDigests, 33, 32), 32);
  ASSERT_TRUE(PutKv(57));
  EXPECT_EQ(Found(kDigests, 33, 32), 32) << "at their share they stay, and KV goes";
  EXPECT_LT(Found(kKv, 1, 56), 56);
  index_->CheckInvariants();
}

TEST_F(DigestOrderTest, HeldDigestsOfAFullShare_RefuseMoreInsteadOfKvGoing) {
  Make(Options(16));
  for (int seed = 1; seed <= 64; ++seed) ASSERT_TRUE(PutKv(seed));
  std::vector<BlockName> names;
  for (int seed = 1; seed <= 32; ++seed) names.push_back(Names(1, kDigestSeed + seed)[0]);
  ASSERT_TRUE(Reserve(kDigests, Claim(5000), names).ok());
  EXPECT_FALSE(PutDigest(33));
  EXPECT_EQ(Found(kKv, 9, 56), 56);
  Release(kDigests, 5000);
  EXPECT_TRUE(PutDigest(33));
  index_->CheckInvariants();
}

TEST_F(DigestOrderTest, BlockNumbers_AreTakenFromKvUnlessDigestsHaveMoreThanHalf) {
  IndexOptions options = Options(16);
  options.blocks_max = 20;
  Make(options);
  for (int seed = 1; seed <= 6; ++seed) ASSERT_TRUE(PutDigest(seed));
  for (int seed = 1; seed <= 14; ++seed) ASSERT_TRUE(PutKv(seed));
  for (int seed = 15; seed <= 60; ++seed) ASSERT_TRUE(PutKv(seed));
  EXPECT_EQ(Found(kDigests, 1, 6), 6);
  EXPECT_EQ(Found(kKv, 47, 14), 14);
  for (int seed = 7; seed <= 100; ++seed) ASSERT_TRUE(PutDigest(seed));
  EXPECT_EQ(Found(kDigests, 91, 10), 10);
  EXPECT_EQ(Found(kDigests, 1, 90), 0);
  EXPECT_EQ(Found(kKv, 51, 10), 10);
  index_->CheckInvariants();
}

TEST_F(DigestOrderTest, TenantAtItsQuota_GivesUpKvBeforeDigestsUpToTheirShare) {
  IndexOptions options = Options(64);
  options.tenant_bytes_max = 32 * record_bytes();  // 16 blocks of KV; share: 8 digests
  Make(options);
  ASSERT_TRUE(PutDigest(1000, "b"));
  for (int seed = 1; seed <= 8; ++seed) ASSERT_TRUE(PutDigest(seed, "a"));
  for (int seed = 1; seed <= 40; ++seed) ASSERT_TRUE(PutKv(seed, "a"));
  EXPECT_EQ(Found(kDigests, 1, 8, "a"), 8);
  EXPECT_GT(Found(kKv, 1, 40, "a"), 4);
  // Four more are beyond the share: of digests the oldest go, not KV for all of them.
  for (int seed = 9; seed <= 12; ++seed) ASSERT_TRUE(PutDigest(seed, "a"));
  ASSERT_TRUE(PutKv(41, "a"));
  EXPECT_EQ(Found(kDigests, 1, 4, "a"), 0);
  EXPECT_GT(Found(kKv, 1, 41, "a"), 3);
  EXPECT_EQ(Found(kDigests, 5, 8, "a"), 8);
  EXPECT_EQ(Found(kDigests, 1000, 1, "b"), 1);
  index_->CheckInvariants();
}

TEST_F(DigestOrderTest, HighWatermark_KvLeavesMemoryFirstAndDigestsWithinTheirShareStay) {
  IndexOptions options = Options(16);  // 128 records of KV; share: 64 records of digests
  options.has_disk = true;
  options.high_watermark = 0.9;
  options.low_watermark = 0.25;
  Make(options);
  for (int seed = 1; seed <= 32; ++seed) ASSERT_TRUE(PutDigest(seed));
  for (int seed = 1; seed <= 56; ++seed) ASSERT_TRUE(PutKv(seed));
  Spilled all = SpillAll();
  EXPECT_GT(all.kv, 80);
  EXPECT_EQ(all.digests, 0);
  EXPECT_EQ(index_->Stats().dropped[0] + index_->Stats().dropped[1], 0u);
  // Below what KV can give, digests leave as well, and come back.
  options.low_watermark = 0.0;
  Make(options);
  for (int seed = 1; seed <= 32; ++seed) ASSERT_TRUE(PutDigest(seed));
  for (int seed = 1; seed <= 56; ++seed) ASSERT_TRUE(PutKv(seed));
  all = SpillAll();
  EXPECT_EQ(all.kv, 112);
  EXPECT_EQ(all.digests, 64);
  EXPECT_EQ(Found(kDigests, 1, 32), 32);
}

TEST_F(DigestOrderTest, HighWatermark_DigestsBeyondTheirShareLeaveFirst) {
  IndexOptions options = Options(16);
  options.has_disk = true;
  options.high_watermark = 0.9;
  options.low_watermark = 0.88;
  Make(options);
  for (int seed = 1; seed <= 64; ++seed) ASSERT_TRUE(PutDigest(seed));  // twice their share
  for (int seed = 1; seed <= 48; ++seed) ASSERT_TRUE(PutKv(seed));
  const Spilled spilled = Spill();
  EXPECT_GT(spilled.digests, 0);
  EXPECT_EQ(spilled.kv, 0);
}

TEST_F(DigestOrderTest, FullDisk_ShedsKvBeforeDigestsUpToTheirShare) {
  IndexOptions options = Options(16);
  options.has_disk = true;
  options.disk_bytes_max = 64 * record_bytes();  // share: 32 records of digests, 16 blocks
  options.high_watermark = 0.5;
  options.low_watermark = 0.0;
  Make(options);
  for (int seed = 1; seed <= 12; ++seed) ASSERT_TRUE(PutDigest(seed));
  for (int seed = 1; seed <= 200; ++seed) {
    ASSERT_TRUE(PutKv(seed));
    SpillAll();
  }
  EXPECT_EQ(Found(kDigests, 1, 12), 12);
  EXPECT_EQ(Found(kKv, 1, 100), 0);
  // Beyond the share the oldest digests go.
  for (int seed = 13; seed <= 60; ++seed) ASSERT_TRUE(PutDigest(seed));
  for (int seed = 201; seed <= 400; ++seed) {
    ASSERT_TRUE(PutKv(seed));
    SpillAll();
  }
  EXPECT_EQ(Found(kDigests, 1, 30), 0);
  EXPECT_GE(Found(kDigests, 31, 30), 14);
  EXPECT_GT(Found(kKv, 380, 21), 15);
}

// Random use with every bound at work.
TEST_F(DigestOrderTest, RandomUse_KeepsTheInvariantsAndTheShares) {
  for (const uint64_t seed : {1u, 2u, 3u, 4u}) {
    SCOPED_TRACE(seed);
    Random random(seed);
    IndexOptions options = Options(16);
    options.has_disk = seed % 2 == 0;
    options.disk_bytes_max = 40 * record_bytes();
    options.blocks_max = seed < 3 ? 90 : 1 << 20;
    options.tenant_bytes_max = 50 * record_bytes();  // of 128
    Make(options);
    for (int step = 0; step < 600; ++step) {
      const auto which = static_cast<int>(random.Below(150));
      const std::string tenant = which % 2 == 0 ? "a" : "b";
      if (random.Below(2) == 0) {
        PutDigest(which, tenant);
      } else {
        PutKv(which, tenant);
      }
      if (random.Below(4) == 0) Spill(1 + random.Below(32) * record_bytes());
      if (step % 10 == 0) index_->CheckInvariants();
    }
    for (int fill = 1000; fill < 1200; ++fill) PutKv(fill, fill % 2 == 0 ? "a" : "b");
    for (const absl::string_view tenant : {"a", "b"}) {
      const uint64_t digests = index_->BytesOfTenant(tenant).digest_memory;
      EXPECT_LE(digests, options.tenant_bytes_max / kDigestSharePart);
      EXPECT_GT(digests, 0u);
    }
    index_->CheckInvariants();
  }
}

}  // namespace
}  // namespace kvt
