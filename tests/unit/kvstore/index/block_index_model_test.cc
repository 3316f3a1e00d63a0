// Random use of a BlockIndex against a plain model of what must hold: bytes by memory place, pins
// by holder, what is sealed. Time is simulated; the seed is printed.
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "kernels/base/random.h"
#include "tests/unit/kvstore/index/index_testing.h"

namespace kvt {
namespace {

constexpr int kWorkers = 3;
constexpr int kTickets = 12;
constexpr int kSequences = 10;
constexpr int kBlocksPerSequence = 6;
constexpr int kSlabs = 8;  // 32 blocks: about half of what the sequences need
constexpr auto kLease = absl::Seconds(10);

using HolderId = std::pair<uint64_t, uint64_t>;  // session, ticket

// The memory of the arena as writers leave it: what a reader must find in a record.
struct Memory : RecordEvents {
  void OnSealed(uint64_t record, uint64_t offset) override {
    ASSERT_FALSE(published.contains(record));
    for (const auto& [other, at] : published) ASSERT_NE(at, offset) << "two records, one place";
    published[record] = offset;
  }
  void OnMovedToDisk(uint64_t) override { FAIL() << "there is no disk"; }
  void OnWithdrawn(uint64_t record) override { ASSERT_EQ(published.erase(record), 1u); }

  std::map<uint64_t, uint64_t> published;    // record handle -> offset
  std::map<uint64_t, std::string> contents;  // offset -> key, plane and slices of who wrote there
};

struct Write {
  uint64_t session;
  RecordRange range;
  uint64_t offset;
  std::string content;
};
struct Read {
  uint64_t record;
  uint64_t offset;
  std::string content;
};

class ModelTest : public testing::TestWithParam<uint64_t> {
 protected:
  ModelTest() : random_(GetParam()) {
    IndexOptions options;
    options.slab_bytes = 8 * kRecord;
    options.arena_bytes = kSlabs * options.slab_bytes;
    options.blocks_max = 200;
    options.lease = kLease;
    options.stall_after = absl::Seconds(2);
    index_ = std::make_unique<BlockIndex>(options, memory_);
    for (int s = 0; s < kSequences; ++s) {
      sequences_.push_back(Names(kBlocksPerSequence, 100 + s));
      for (const BlockName& name : sequences_.back()) keys_[name.key] = name;
    }
  }

  static inline const uint32_t kRecord = SmallGeometry().RecordBytes();
  static inline const uint32_t kSlice = SmallGeometry().SliceBytes();

  uint64_t Pick(uint64_t n) { return random_.Below(n); }
  std::vector<BlockName> SomeBlocks() {
    const auto& sequence = sequences_[Pick(kSequences)];
    return {sequence.begin(),
            sequence.begin() + 1 + static_cast<int64_t>(Pick(kBlocksPerSequence))};
  }
  // A live session, or none.
  uint64_t SomeSession() {
    if (sessions_.empty()) return 0;
    auto it = sessions_.begin();
    std::advance(it, Pick(sessions_.size()));
    return it->first;
  }
  TicketClaim SomeTicket() {
    const uint64_t id = 1 + Pick(kTickets);
    return Claim(id, epochs_[id]);
  }

  void Forget(uint64_t session) {
    std::erase_if(pins_, [&](const auto& pin) { return pin.first.first == session; });
    std::erase_if(reserved_, [&](const auto& item) { return item.second.first == session; });
    sessions_.erase(session);
  }
  void ForgetHolder(HolderId holder) {
    pins_.erase(holder);
    std::erase_if(reserved_, [&](const auto& item) { return item.second == holder; });
  }
  // Time passes: the model ends leases as the index must.
  void Advance(absl::Duration by) {
    while (by > absl::ZeroDuration()) {
      const absl::Duration step = std::min(by, absl::Duration(absl::Seconds(1)));
      now_ += step;
      by -= step;
      index_->NoteTime(now_);
      std::vector<uint64_t> ended;
      for (const auto& [id, session] : sessions_) {
        if (session.second <= now_) ended.push_back(id);
      }
      for (const uint64_t id : ended) Forget(id);
    }
  }

  void OpenSession() {
    const uint64_t worker = Pick(kWorkers);
    const uint64_t id = ++next_session_;
    ASSERT_TRUE(index_->OpenSession(now_, Spec(id, "w" + std::to_string(worker), id)).ok());
    for (const auto& [other, session] : std::map(sessions_)) {
      if (session.first == worker) Forget(other);
    }
    sessions_[id] = {worker, now_ + kLease};
  }

  void Renew() {
    const uint64_t session = SomeSession();
    if (session == 0) return;
    std::vector<LiveTicket> live;
    std::set<uint64_t> listed;
    for (uint64_t id = 1; id <= kTickets; ++id) {
      if (Pick(12) == 0) continue;
      live.push_back(Live(id, epochs_[id]));
      listed.insert(id);
    }
    ASSERT_TRUE(index_->Renew(now_, SessionId(session), live).ok());
    sessions_[session].second = now_ + kLease;
    for (uint64_t id = 1; id <= kTickets; ++id) {
      if (!listed.contains(id)) ForgetHolder({session, id});
    }
  }

  void RaiseEpoch() {
    const uint64_t id = 1 + Pick(kTickets);
    const uint64_t session = SomeSession();
    if (session == 0) return;
    ++epochs_[id];
    std::vector<FoundBlock> found;
    ASSERT_TRUE(index_->Lookup(now_, SessionId(session), Claim(id, epochs_[id]), {}, &found).ok());
    for (const auto& [other, unused] : sessions_) ForgetHolder({other, id});
    // The lower epoch is refused from now on.
    EXPECT_EQ(
        index_->Lookup(now_, SessionId(session), Claim(id, epochs_[id] - 1), {}, &found).code(),
        absl::StatusCode::kFailedPrecondition);
  }

  void Lookup() {
    const uint64_t session = SomeSession();
    if (session == 0) return;
    const TicketClaim claim = SomeTicket();
    const auto names = SomeBlocks();
    std::vector<FoundBlock> found;
    ASSERT_TRUE(index_->Lookup(now_, SessionId(session), claim, names, &found).ok());
    for (size_t i = 0; i < names.size(); ++i) {
      const bool pinned = IsPinnedByAnyone(names[i].key);
      if (found[i].presence == BlockPresence::kAbsent) {
        // Only what nobody pins may have been evicted.
        EXPECT_FALSE(pinned) << "a pinned block is gone";
        continue;
      }
      const auto sealed = sealed_.find(found[i].handle);
      ASSERT_NE(sealed, sealed_.end()) << "found what was never sealed";
      EXPECT_EQ(sealed->second, names[i].key);
      pins_[{session, claim.id.value()}].insert(found[i].handle);
    }
  }

  void Reserve() {
    const uint64_t session = SomeSession();
    if (session == 0) return;
    const TicketClaim claim = SomeTicket();
    const auto names = SomeBlocks();
    const uint32_t output = static_cast<uint32_t>(Pick(10) == 0 ? 100 : Pick(3));
    const IndexStats before = index_->Stats();
    std::vector<ReservedBlock> reserved;
    const absl::Status status =
        index_->Reserve(now_, SessionId(session), claim, names, output, &reserved);
    if (!status.ok()) {
      ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      const IndexStats after = index_->Stats();
      EXPECT_EQ(after.evicted_blocks, before.evicted_blocks) << "a refusal evicted";
      EXPECT_EQ(after.used_bytes, before.used_bytes);
      EXPECT_EQ(after.pins, before.pins);
      ++refused_;
      return;
    }
    for (size_t i = 0; i < names.size(); ++i) {
      const uint64_t handle = reserved[i].handle;
      if (reserved[i].already_sealed) {
        ASSERT_EQ(sealed_.at(handle), names[i].key);
        pins_[{session, claim.id.value()}].insert(handle);
      } else {
        ASSERT_FALSE(sealed_.contains(handle)) << "a handle given twice";
        reserved_[handle] = {session, claim.id.value()};
        reserved_keys_[handle] = names[i].key;
      }
    }
  }

  void BeginWrite() {
    if (reserved_.empty() || writes_.size() > 20) return;
    auto it = reserved_.begin();
    std::advance(it, Pick(reserved_.size()));
    const auto [session, ticket] = it->second;
    // A layer, a head of a layer, or the whole record.
    static constexpr uint32_t kHeads = 2, kLayers = 2;
    uint32_t first = 0, count = kHeads * kLayers;
    if (Pick(3) == 0) {
      first = static_cast<uint32_t>(Pick(kHeads * kLayers));
      count = 1;
    } else if (Pick(2) == 0) {
      first = kHeads * static_cast<uint32_t>(Pick(kLayers));
      count = kHeads;
    }
    Write write;
    write.session = session;
    const Plane plane = Pick(2) == 0 ? Plane::kBase : Plane::kResidual;
    write.range = RecordRange{TicketId(ticket), TicketEpoch(epochs_[ticket]),
                              PlaneRecordHandle(it->first, plane), first * kSlice, count * kSlice};
    const Access access = index_->BeginWrite(SessionId(session), write.range, &write.offset);
    ASSERT_EQ(access, Access::kOk) << static_cast<int>(access);
    for (uint32_t slice = 0; slice < count; ++slice) {
      // As soon as the write begins the memory is not what it was.
      memory_.contents[write.offset + slice * kSlice] = "";
    }
    write.content = reserved_keys_[it->first].ToHex() + (plane == Plane::kBase ? "B" : "R");
    writes_.push_back(write);
  }

  void EndWrite() {
    if (writes_.empty()) return;
    const size_t at = Pick(writes_.size());
    const Write write = writes_[at];
    writes_.erase(writes_.begin() + static_cast<int64_t>(at));
    const bool arrived = Pick(8) != 0;
    const uint32_t first = write.range.offset / kSlice;
    for (uint32_t slice = 0; slice < write.range.length / kSlice; ++slice) {
      memory_.contents[write.offset + slice * kSlice] =
          arrived ? write.content + std::to_string(first + slice) : "garbage";
    }
    const uint64_t handle = MakeBlockHandle(BlockOfRecord(write.range.record_handle),
                                            GenerationOfHandle(write.range.record_handle));
    const bool there = index_->EndWrite(write.range, arrived);
    EXPECT_EQ(there, reserved_.contains(handle)) << "the reservation's fate";
    if (there) NoteSeal(handle);
  }

  // Asks how the reservation stands and checks that the answer is right.
  void NoteSeal(uint64_t handle) {
    const HolderId holder = reserved_.at(handle);
    std::vector<SealedBlock> out;
    ASSERT_TRUE(index_
                    ->Seal(now_, SessionId(holder.first),
                           Live(holder.second, epochs_[holder.second]), {handle}, &out)
                    .ok());
    const BlockKey key = reserved_keys_.at(handle);
    switch (out[0].outcome) {
      case IndexSealOutcome::kIncomplete:
        return;
      case IndexSealOutcome::kLost:
        FAIL() << "a reservation was lost";
      case IndexSealOutcome::kSealed:
        // A block without RESIDUAL that bears the key stays for those who pin it, and is not found.
        for (const auto& [other, other_key] : sealed_) {
          if (other_key == key) superseded_.insert(other);
        }
        sealed_[handle] = key;
        pins_[holder].insert(handle);
        ++seals_;
        break;
      case IndexSealOutcome::kWinnerElsewhere:
        ASSERT_EQ(sealed_.at(out[0].handle), key);
        pins_[holder].insert(out[0].handle);
        ++winners_;
        break;
    }
    reserved_.erase(handle);
  }

  void BeginRead() {
    if (pins_.empty() || reads_.size() > 20) return;
    auto it = pins_.begin();
    std::advance(it, Pick(pins_.size()));
    const auto& [holder, handles] = *it;
    if (handles.empty()) return;
    auto handle = handles.begin();
    std::advance(handle, Pick(handles.size()));
    const Plane plane = Pick(2) == 0 ? Plane::kBase : Plane::kResidual;
    const RecordRange range{TicketId(holder.second), TicketEpoch(epochs_[holder.second]),
                            PlaneRecordHandle(*handle, plane), 0, kRecord};
    Read read;
    const Access access = index_->BeginRead(SessionId(holder.first), range, &read.offset);
    const bool dropped = plane == Plane::kResidual && dropped_.contains(*handle);
    ASSERT_EQ(access, dropped ? Access::kLost : Access::kOk) << "a pinned block cannot be read";
    if (dropped) return;
    read.record = range.record_handle;
    read.content = sealed_.at(*handle).ToHex() + (plane == Plane::kBase ? "B" : "R");
    CheckBytes(read);
    reads_.push_back(read);
  }

  void CheckBytes(const Read& read) {
    for (uint32_t slice = 0; slice < kRecord / kSlice; ++slice) {
      ASSERT_EQ(memory_.contents[read.offset + slice * kSlice],
                read.content + std::to_string(slice))
          << "foreign or changed bytes";
    }
  }

  void EndRead() {
    if (reads_.empty()) return;
    const size_t at = Pick(reads_.size());
    CheckBytes(reads_[at]);  // although its pins may be gone since
    index_->EndRead(reads_[at].record);
    reads_.erase(reads_.begin() + static_cast<int64_t>(at));
  }

  void Release() {
    const uint64_t session = SomeSession();
    if (session == 0) return;
    const uint64_t id = 1 + Pick(kTickets);
    ASSERT_TRUE(index_->Release(now_, SessionId(session), Live(id, epochs_[id])).ok());
    ForgetHolder({session, id});
  }

  void DropResidual() {
    if (sealed_.empty()) return;
    auto it = sealed_.begin();
    std::advance(it, Pick(sealed_.size()));
    const uint64_t handle = it->first;
    const bool dropped = index_->TryDropResidual(handle);
    if (dropped) {
      EXPECT_FALSE(IsPinned(handle));
      dropped_.insert(handle);
    }
  }

  bool IsPinned(uint64_t handle) const {
    for (const auto& [holder, handles] : pins_) {
      if (handles.contains(handle)) return true;
    }
    return false;
  }
  // A block that lookups must find.
  bool IsPinnedByAnyone(const BlockKey& key) const {
    for (const auto& [holder, handles] : pins_) {
      for (const uint64_t handle : handles) {
        if (sealed_.at(handle) == key && !superseded_.contains(handle)) return true;
      }
    }
    return false;
  }

  void Check() {
    index_->CheckInvariants();
    const IndexStats stats = index_->Stats();
    uint64_t pins = 0;
    std::set<uint64_t> pinned;
    for (const auto& [holder, handles] : pins_) {
      pins += handles.size();
      pinned.insert(handles.begin(), handles.end());
    }
    ASSERT_EQ(stats.pins, pins);
    ASSERT_EQ(stats.pinned_blocks, pinned.size());
    ASSERT_EQ(stats.sessions, sessions_.size());
    std::set<uint64_t> in_flight;
    for (const Read& read : reads_) in_flight.insert(read.record);
    for (const Write& write : writes_) in_flight.insert(write.range.record_handle);
    ASSERT_EQ(stats.in_flight, in_flight.size());
  }

  void Step() {
    switch (Pick(100)) {
      case 0:
        return OpenSession();
      case 1:
        return Advance(absl::Seconds(1 + Pick(4)));
      case 2:
        return RaiseEpoch();
      case 3:
        if (const uint64_t session = SomeSession(); session != 0 && Pick(4) == 0) {
          ASSERT_TRUE(index_->CloseSession(now_, SessionId(session)).ok());
          Forget(session);
        }
        return;
      case 4 ... 7:
        return Renew();
      case 8 ... 11:
        return DropResidual();
      case 12 ... 17:
        return Release();
      case 18 ... 27:
        return Lookup();
      case 28 ... 37:
        return Reserve();
      case 38 ... 60:
        return BeginWrite();
      case 61 ... 84:
        return EndWrite();
      case 85 ... 92:
        return BeginRead();
      default:
        return EndRead();
    }
  }

  Random random_;
  Memory memory_;
  std::unique_ptr<BlockIndex> index_;
  absl::Time now_ = T(1000);
  std::vector<std::vector<BlockName>> sequences_;
  std::map<BlockKey, BlockName> keys_;

  uint64_t next_session_ = 0;
  std::map<uint64_t, std::pair<uint64_t, absl::Time>> sessions_;  // id -> worker, lease end
  std::map<uint64_t, uint32_t> epochs_;                           // by ticket
  std::map<HolderId, std::set<uint64_t>> pins_;                   // handles
  std::map<uint64_t, HolderId> reserved_;                         // handle -> holder; unsealed
  std::map<uint64_t, BlockKey> reserved_keys_;
  std::map<uint64_t, BlockKey> sealed_;  // ever
  std::set<uint64_t> dropped_;           // handles without RESIDUAL
  std::set<uint64_t> superseded_;        // of those, handles that another sealed block replaced
  std::vector<Write> writes_;
  std::vector<Read> reads_;
  uint64_t refused_ = 0, seals_ = 0, winners_ = 0;
};

TEST_P(ModelTest, RandomUse_KeepsEveryInvariant) {
  SCOPED_TRACE(testing::Message() << "seed " << GetParam());
  for (int step = 0; step < 150000; ++step) {
    Step();
    if (HasFatalFailure()) FAIL() << "at step " << step;
    if (step % 64 == 0) Check();
    if (HasFatalFailure()) FAIL() << "at step " << step;
  }
  // The run met what it is for.
  const IndexStats stats = index_->Stats();
  EXPECT_GT(stats.evicted_blocks, 100u);
  EXPECT_GT(stats.base_only_blocks, 10u);
  EXPECT_GT(refused_, 10u);
  EXPECT_GT(seals_, 100u);
  EXPECT_GT(winners_, 10u);
  // Everything ends: transfers, then leases.
  while (!writes_.empty()) EndWrite();
  while (!reads_.empty()) EndRead();
  Advance(kLease + absl::Seconds(1));
  Check();
  const IndexStats end = index_->Stats();
  EXPECT_EQ(end.pins + end.sessions + end.tickets + end.in_flight + end.output_reserved_blocks, 0u);
  EXPECT_EQ(end.reserved_bytes + end.writing_bytes + end.evicting_bytes, 0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, ModelTest, testing::Values(1, 2, 3, 4, 20261129));

}  // namespace
}  // namespace kvt
