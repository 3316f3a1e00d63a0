// A BlockIndex over small blocks with what tests need around it: names, claims, whole-block writes,
// and a watch over RecordEvents.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "kvstore/index/block_index.h"

namespace kvt {

// Fails the test when a record is published twice, withdrawn unpublished, or when two published
// records share memory.
class WatchedEvents final : public RecordEvents {
 public:
  void OnSealed(uint64_t record, uint64_t offset) override {
    on_disk.erase(record);
    EXPECT_TRUE(offsets.emplace(record, offset).second) << "published twice";
    EXPECT_TRUE(records.emplace(offset, record).second) << "memory of a published record reused";
  }
  void OnMovedToDisk(uint64_t record) override {
    if (const auto it = offsets.find(record); it != offsets.end()) {
      records.erase(it->second);
      offsets.erase(it);
    }
    EXPECT_TRUE(on_disk.insert(record).second) << "moved to disk twice";
  }
  void OnWithdrawn(uint64_t record) override {
    if (on_disk.erase(record) > 0) return;
    const auto it = offsets.find(record);
    ASSERT_NE(it, offsets.end()) << "withdrawn, not published";
    records.erase(it->second);
    offsets.erase(it);
  }
  absl::flat_hash_map<uint64_t, uint64_t> offsets;  // record handle -> offset
  absl::flat_hash_map<uint64_t, uint64_t> records;  // the inverse
  absl::flat_hash_set<uint64_t> on_disk;            // alone
};

inline Geometry SmallGeometry() { return Geometry{.layers = 2, .kv_heads = 2, .head_dim = 32}; }

inline absl::Time T(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

inline SessionSpec Spec(uint64_t session, const std::string& worker, uint64_t epoch = 1,
                        const Geometry& geometry = SmallGeometry()) {
  return SessionSpec{SessionId(session), "0123456789abcdef", worker,
                     BootEpoch(epoch),   geometry,           "model",
                     "numerics"};
}

inline TicketClaim Claim(uint64_t id, uint32_t epoch = 1, absl::string_view tenant = "") {
  return TicketClaim{TicketId(id), TicketEpoch(epoch), tenant, Provenance::kExact};
}

inline LiveTicket Live(uint64_t id, uint32_t epoch = 1) {
  return LiveTicket{TicketId(id), TicketEpoch(epoch)};
}

// Blocks [first, first + count) of the sequence whose tokens are seed, seed, ...; private to `owner`
// where it is one.
inline std::vector<BlockName> Names(int count, int seed, int first = 0, TicketId owner = {},
                                    Provenance provenance = Provenance::kExact) {
  KeyDomain domain;
  domain.cluster_secret = "s";
  domain.geometry = SmallGeometry();
  const KeyChain chain(domain);
  std::vector<BlockName> names;
  BlockKey parent = chain.Root();
  for (int i = 0; i < first + count; ++i) {
    BlockName name;
    name.parent = parent;
    name.tokens.assign(kBlockTokens, seed);
    name.provenance = provenance;
    name.ticket_private = owner.value() != 0;
    name.key = name.ticket_private
                   ? chain.NextPrivate(parent, name.tokens, provenance, owner)
                   : chain.Next(parent, name.tokens, provenance);
    parent = name.key;
    if (i >= first) names.push_back(std::move(name));
  }
  return names;
}

class IndexTest : public testing::Test {
 protected:
  // An arena of `slabs` slabs of eight records of SmallGeometry: four blocks a slab.
  void MakeIndex(int slabs, absl::Duration lease = absl::Seconds(10)) {
    IndexOptions options;
    options.slab_bytes = 8 * record_bytes();
    options.arena_bytes = slabs * options.slab_bytes;
    options.blocks_max = 1 << 20;
    options.lease = lease;
    options.stall_after = absl::Hours(1);
    index_ = std::make_unique<BlockIndex>(options, events_);
  }
  static uint32_t record_bytes() { return SmallGeometry().RecordBytes(); }

  void Open(uint64_t session, const std::string& worker = "w", uint64_t epoch = 1) {
    ASSERT_TRUE(
        index_->OpenSession(now_, Spec(session, worker + std::to_string(session), epoch)).ok());
  }
  absl::StatusOr<std::vector<FoundBlock>> Lookup(uint64_t session, const TicketClaim& claim,
                                                 const std::vector<BlockName>& names) {
    std::vector<FoundBlock> found;
    const absl::Status status = index_->Lookup(now_, SessionId(session), claim, names, &found);
    if (!status.ok()) return status;
    return found;
  }
  int Hits(uint64_t session, const TicketClaim& claim, const std::vector<BlockName>& names) {
    const auto found = Lookup(session, claim, names);
    EXPECT_TRUE(found.ok()) << found.status();
    if (!found.ok()) return -1;
    int hits = 0;
    for (const FoundBlock& block : *found) hits += block.presence == BlockPresence::kExact ? 1 : 0;
    return hits;
  }
  absl::StatusOr<std::vector<ReservedBlock>> Reserve(uint64_t session, const TicketClaim& claim,
                                                     const std::vector<BlockName>& names,
                                                     uint32_t output_blocks = 0) {
    std::vector<ReservedBlock> reserved;
    const absl::Status status =
        index_->Reserve(now_, SessionId(session), claim, names, output_blocks, &reserved);
    if (!status.ok()) return status;
    return reserved;
  }
  RecordRange Range(const TicketClaim& claim, uint64_t handle, Plane plane, uint32_t offset,
                    uint32_t length) {
    return RecordRange{claim.id, claim.epoch, PlaneRecordHandle(handle, plane), offset, length};
  }
  // Pushes both planes whole.
  void Write(uint64_t session, const TicketClaim& claim, uint64_t handle) {
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      const RecordRange range = Range(claim, handle, plane, 0, record_bytes());
      uint64_t offset = 0;
      ASSERT_EQ(index_->BeginWrite(SessionId(session), range, &offset), Access::kOk);
      EXPECT_TRUE(index_->EndWrite(range, true));
    }
  }
  // Reserves and writes those that are not there.
  void Store(uint64_t session, const TicketClaim& claim, const std::vector<BlockName>& names) {
    const auto reserved = Reserve(session, claim, names);
    ASSERT_TRUE(reserved.ok()) << reserved.status();
    for (const ReservedBlock& block : *reserved) {
      if (!block.already_sealed) Write(session, claim, block.handle);
    }
  }
  void Release(uint64_t session, uint64_t ticket, uint32_t epoch = 1) {
    EXPECT_TRUE(index_->Release(now_, SessionId(session), Live(ticket, epoch)).ok());
  }
  SealedBlock SealOne(uint64_t session, const TicketClaim& claim, uint64_t handle) {
    std::vector<SealedBlock> out;
    EXPECT_TRUE(
        index_->Seal(now_, SessionId(session), LiveTicket{claim.id, claim.epoch}, {handle}, &out)
            .ok());
    return out.empty() ? SealedBlock() : out[0];
  }
  Access Read(uint64_t session, const TicketClaim& claim, uint64_t handle,
              Plane plane = Plane::kBase) {
    uint64_t offset = 0;
    const RecordRange range = Range(claim, handle, plane, 0, record_bytes());
    const Access access = index_->BeginRead(SessionId(session), range, &offset);
    if (access == Access::kOk) index_->EndRead(range.record_handle);
    return access;
  }
  void ExpectIdle() {
    index_->CheckInvariants();
    const IndexStats stats = index_->Stats();
    EXPECT_EQ(stats.pins, 0u);
    EXPECT_EQ(stats.pinned_blocks, 0u);
    EXPECT_EQ(stats.in_flight, 0u);
    EXPECT_EQ(stats.reserved_bytes, 0u);
    EXPECT_EQ(stats.writing_bytes, 0u);
    EXPECT_EQ(stats.evicting_bytes, 0u);
    EXPECT_EQ(stats.output_reserved_blocks, 0u);
    EXPECT_EQ(stats.tickets, 0u);
    EXPECT_EQ(stats.used_bytes, stats.blocks * 2 * record_bytes());
  }

  WatchedEvents events_;
  std::unique_ptr<BlockIndex> index_;
  absl::Time now_ = T(100);
};

}  // namespace kvt
