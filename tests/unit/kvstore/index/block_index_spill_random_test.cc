// Random use of an index with a disk: the bytes that writers, spills and promotions leave are
// modelled, so that a foreign byte, a record reused under a read or a write to disk, and a disk
// that differs from the index are seen. The seed is printed.
#include <map>
#include <optional>
#include <set>

#include "kernels/base/random.h"
#include "tests/unit/kvstore/index/index_testing.h"

namespace kvt {
namespace {

constexpr int kSeeds = 40;  // blocks that exist; memory holds 16
constexpr int kTickets = 10;

class SpillRandomTest : public IndexTest, public testing::WithParamInterface<uint64_t> {
 protected:
  SpillRandomTest() : random_(GetParam()) { Boot(); }

  void Boot() {
    IndexOptions options;
    options.slab_bytes = 8 * record_bytes();
    options.arena_bytes = 4 * options.slab_bytes;
    options.blocks_max = 60;
    options.stall_after = absl::Hours(1);
    options.lease = absl::Hours(10);
    options.boot = ++boot_;
    options.has_disk = true;
    options.disk_bytes_max = 50 * record_bytes();
    options.promoted_hold = absl::Seconds(2);
    options.spill_one_time = GetParam() % 2 == 0;
    index_ = std::make_unique<BlockIndex>(options, events_);
    Open(boot_);
  }
  uint64_t Pick(uint64_t n) { return random_.Below(n); }
  std::string ContentOf(const BlockKey& key, Plane plane) const {
    return key.ToHex() + (plane == Plane::kBase ? "B" : "R");
  }
  static std::string DiskKey(const BlockKey& key, Plane plane) {
    return key.ToHex() + (plane == Plane::kBase ? "B" : "R");
  }

  void Put() {
    const uint64_t seed = 1 + Pick(kSeeds);
    const uint64_t ticket = 1 + Pick(kTickets);
    const auto reserved = Reserve(boot_, Claim(ticket), Names(1, seed), Pick(3));
    if (!reserved.ok()) {
      ASSERT_EQ(reserved.status().code(), absl::StatusCode::kResourceExhausted);
      ++refused_;
      return;
    }
    const ReservedBlock& block = (*reserved)[0];
    if (block.already_sealed || Pick(10) == 0) return;
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      const RecordRange range = Range(Claim(ticket), block.handle, plane, 0, record_bytes());
      uint64_t offset = 0;
      const Access access = index_->BeginWrite(SessionId(boot_), range, &offset);
      if (access == Access::kLost) return;  // sealed meanwhile
      ASSERT_EQ(access, Access::kOk);
      ASSERT_FALSE(touched_.contains(offset)) << "memory written that something reads";
      memory_[offset] = ContentOf(Names(1, seed)[0].key, plane);
      index_->EndWrite(range, true);
    }
  }
  void Look() {
    const uint64_t seed = 1 + Pick(kSeeds);
    const uint64_t ticket = 1 + Pick(kTickets);
    const auto found = Lookup(boot_, Claim(ticket), Names(1, seed));
    ASSERT_TRUE(found.ok());
    const FoundBlock& block = (*found)[0];
    if (block.presence == BlockPresence::kAbsent) return;
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      const auto p = static_cast<size_t>(plane);
      if (plane == Plane::kResidual && block.presence != BlockPresence::kExact) continue;
      const RecordRange range = Range(Claim(ticket), block.handle, plane, 0, record_bytes());
      uint64_t offset = 0;
      const Access access = index_->BeginRead(SessionId(boot_), range, &offset);
      ASSERT_EQ(access, block.on_disk[p] ? Access::kOnDisk : Access::kOk);
      if (access == Access::kOk) {
        ASSERT_EQ(memory_[offset], ContentOf(Names(1, seed)[0].key, plane)) << "foreign bytes";
        touched_.insert(offset);
        reads_.emplace_back(range.record_handle, offset, memory_[offset]);
      }
    }
    // Afterwards: room for one plane may cost the other.
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      if (!block.on_disk[static_cast<size_t>(plane)]) continue;
      PromoteJob job;
      const PromoteBegin begin = index_->BeginPromote(now_, SessionId(boot_), Live(ticket),
                                                      PlaneRecordHandle(block.handle, plane), &job);
      ASSERT_NE(begin, PromoteBegin::kLost) << "pinned and on disk";
      if (begin != PromoteBegin::kStarted) continue;
      ASSERT_FALSE(touched_.contains(job.offset)) << "a landing that something reads";
      touched_.insert(job.offset);
      loads_.emplace_back(job, plane);
    }
  }
  template <typename T>
  T TakeOne(std::vector<T>& from) {
    const size_t at = Pick(from.size());
    T one = from[at];
    from.erase(from.begin() + static_cast<int64_t>(at));
    return one;
  }
  void Untouch(uint64_t offset) { touched_.erase(touched_.find(offset)); }

  void EndRead() {
    if (reads_.empty()) return;
    const auto [record, offset, content] = TakeOne(reads_);
    ASSERT_EQ(memory_[offset], content) << "changed under a read";
    Untouch(offset);
    index_->EndRead(record);
  }
  void EndLoad() {
    if (loads_.empty()) return;
    const auto [job, plane] = TakeOne(loads_);
    Untouch(job.offset);
    const auto on_disk = disk_.find(DiskKey(job.key, plane));
    // The node finds a missing or corrupt record; sometimes the disk fails.
    const bool loaded = on_disk != disk_.end() && Pick(10) != 0;
    memory_[job.offset] = loaded ? on_disk->second.content : "torn";
    index_->EndPromote(now_, job.record_handle, loaded);
  }
  // One round of the writer, as the node makes it: erasures, then writes; their ends come later.
  void WriterRound() {
    for (; !writes_.empty();) {
      const SpillJob job = TakeOne(writes_);
      const Plane plane = PlaneOfRecord(job.record_handle);
      Untouch(job.offset);
      const bool written = Pick(6) != 0;
      if (written) {
        ASSERT_EQ(memory_[job.offset], ContentOf(job.key, plane)) << "changed under a write";
        const Block* const block = index_->FindBlock(MakeBlockHandle(
            BlockOfRecord(job.record_handle), GenerationOfHandle(job.record_handle)));
        ASSERT_NE(block, nullptr);
        disk_[DiskKey(job.key, plane)] = {memory_[job.offset], block->incarnation, job.key, plane};
        ++spilled_;
      }
      index_->EndSpill(now_, job.record_handle, written);
    }
    std::vector<DiskErasure> erasures;
    index_->TakeErasures(1000, &erasures);
    for (const DiskErasure& erasure : erasures) disk_.erase(DiskKey(erasure.key, erasure.plane));
    index_->TakeSpills(now_, (1 + Pick(6)) * record_bytes(), &writes_);
    for (const SpillJob& job : writes_) touched_.insert(job.offset);
    CheckDisk();
  }
  // What the index says is on disk can be read there.
  void CheckDisk() {
    const IndexStats stats = index_->Stats();
    // Besides, what is erased in the index and not yet there.
    EXPECT_LE(stats.disk_records[0] + stats.disk_records[1], disk_.size());
  }
  // A crash: memory, index and jobs are gone; the disk stays, but for some unsynced records.
  void Crash() {
    memory_.clear();
    touched_.clear();
    reads_.clear();
    loads_.clear();
    writes_.clear();
    events_ = WatchedEvents();
    std::erase_if(disk_, [this](const auto&) { return Pick(8) == 0; });
    Boot();
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      for (auto it = disk_.begin(); it != disk_.end();) {
        const auto& [name, record] = *it;
        if (record.plane != plane) {
          ++it;
          continue;
        }
        bool kept = false;
        if (plane == Plane::kBase) {
          RestoredBlock block;
          for (int seed = 1; seed <= kSeeds; ++seed) {
            if (Names(1, seed)[0].key == record.key) block.name = Names(1, seed)[0];
          }
          block.model_fingerprint = "model";
          block.numerics_id = "numerics";
          block.geometry = SmallGeometry();
          block.incarnation = record.incarnation;
          kept = index_->RestoreBlock(block).ok();
        } else {
          kept = index_->RestoreResidual(record.key, record.incarnation).ok();
        }
        it = kept ? std::next(it) : disk_.erase(it);
      }
    }
    const IndexStats stats = index_->Stats();
    EXPECT_EQ(stats.disk_records[0] + stats.disk_records[1], disk_.size())
        << "index and readable data differ after a restart";
    ++crashes_;
  }

  void Step() {
    switch (Pick(200)) {
      case 0:
        if (Pick(5) == 0) return Crash();
        return;
      case 1:
        now_ += absl::Seconds(1);
        return;
      case 2:
        if (Pick(10) == 0) index_->PurgeTenant("");
        return;
      case 3 ... 60:
        return Put();
      case 61 ... 110:
        return Look();
      case 111 ... 135:
        return EndRead();
      case 136 ... 150:
        return EndLoad();
      case 151 ... 165:
        return WriterRound();
      default:
        ASSERT_TRUE(index_->Release(now_, SessionId(boot_), Live(1 + Pick(kTickets))).ok());
    }
  }

  struct OnDisk {
    std::string content;
    uint64_t incarnation = 0;
    BlockKey key;
    Plane plane = Plane::kBase;
  };
  Random random_;
  uint64_t boot_ = 0;
  std::map<uint64_t, std::string> memory_;  // offset -> content
  std::multiset<uint64_t> touched_;         // offsets that reads, writes to disk or loads use
  std::map<std::string, OnDisk> disk_;
  std::vector<std::tuple<uint64_t, uint64_t, std::string>> reads_;
  std::vector<std::pair<PromoteJob, Plane>> loads_;
  std::vector<SpillJob> writes_;
  uint64_t refused_ = 0, spilled_ = 0, crashes_ = 0;
};

TEST_P(SpillRandomTest, RandomUse_NoForeignByteAndDiskEqualsIndex) {
  SCOPED_TRACE(testing::Message() << "seed " << GetParam());
  uint64_t promoted = 0;
  for (int step = 0; step < 60000; ++step) {
    const uint64_t before = index_->Stats().promoted[0] + index_->Stats().promoted[1];
    Step();
    const uint64_t after = index_->Stats().promoted[0] + index_->Stats().promoted[1];
    promoted += after > before ? after - before : 0;
    if (step % 32 == 0) index_->CheckInvariants();
    if (HasFatalFailure()) FAIL() << "at step " << step;
  }
  EXPECT_GT(refused_, 10u);
  EXPECT_GT(spilled_, 100u);
  EXPECT_GT(promoted, 100u);
  EXPECT_GT(crashes_, 10u);
  while (!reads_.empty()) EndRead();
  while (!loads_.empty()) EndLoad();
  for (uint64_t ticket = 1; ticket <= kTickets; ++ticket) Release(boot_, ticket);
  while (!writes_.empty()) WriterRound();
  index_->CheckInvariants();
  const IndexStats stats = index_->Stats();
  EXPECT_EQ(stats.pins + stats.in_flight + stats.promoting_bytes + stats.evicting_bytes, 0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, SpillRandomTest, testing::Values(1, 2, 3, 4, 20261129));

}  // namespace
}  // namespace kvt
