// A StoreNode over a small arena with a disk in memory (memory_spill_store.h): puts, lookups, pulls
// with their bytes checked, and rounds of the disk made by hand, so that a test orders them. The
// medium outlives the store: a new one on it is a restart.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "tests/support/memory_spill_store.h"
#include "tests/support/store_testing.h"

namespace kvt {

struct SpillingOptions {
  int blocks = 16;  // that memory holds
  bool one_time = true;
  uint64_t disk_bytes_max = 0;
  uint64_t tenant_bytes_max = 0;
  uint64_t tenant_disk_bytes_max = 0;
  absl::Duration spill_wait = absl::ZeroDuration();
};

class SpillingStore {
 public:
  SpillingStore(std::shared_ptr<MemorySpillMedium> medium, const TicketMaker& tickets,
                const Clock& clock, SpillingOptions options = {})
      : tickets_(tickets) {
    static uint64_t boots = 0;
    StoreNodeConfig config;
    config.name = "store-0";
    config.epoch = BootEpoch(++boots);
    config.lease = absl::Hours(10);
    config.slab_bytes = 4 * TestGeometry().RecordBytes();
    config.blocks_max = 4096;
    config.has_disk = true;
    config.spill_one_time = options.one_time;
    config.disk_bytes_max = options.disk_bytes_max;
    config.tenant_bytes_max = options.tenant_bytes_max;
    config.spill_wait = options.spill_wait;
    config.tenant_disk_bytes_max = options.tenant_disk_bytes_max;
    absl::StatusOr<Arena> arena = Arena::Create(
        uint64_t{(options.blocks + 1u) / 2u} * config.slab_bytes, config.blocks_max * kPlanes);
    EXPECT_TRUE(arena.ok()) << arena.status();
    arena_ = std::make_unique<Arena>(*std::move(arena));
    disk_ = std::make_unique<MemorySpillStore>(std::move(medium));
    node_ = std::make_unique<StoreNode>(config, *arena_, clock);
    EXPECT_TRUE(node_->AddTicketKey(tickets_.PublicKey()).ok());
    attached_ = node_->AttachDisk(*disk_);
    const auto session = node_->OpenSession(TestOpen("w"));
    EXPECT_TRUE(session.ok()) << session.status();
    session_ = session->session;
  }
  StoreNode& node() { return *node_; }
  [[nodiscard]] SessionId session() const { return session_; }
  // Of AttachDisk.
  [[nodiscard]] const absl::Status& attached() const { return attached_; }

  // Writes a block and lets it go. The refusal's status.
  absl::Status Put(uint64_t ticket, const BlockName& name, const std::string& tenant = "") {
    const auto reserved =
        node_->Reserve({session_, tickets_.Make(ticket, 1, tenant), {name}, 0, {}});
    if (!reserved.ok()) return reserved.status();
    if (!reserved->blocks[0].already_sealed) {
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        Push(ticket, name.key, PlaneRecordHandle(reserved->blocks[0].place.handle, plane));
      }
    }
    return node_->Release({session_, Ref(ticket)});
  }
  void Push(uint64_t ticket, const BlockKey& key, uint64_t record) {
    const Piece piece = PieceOf(ticket, record);
    ResolvedPush to;
    node_->ResolvePush(session_, {&piece, 1}, {&to, 1});
    ASSERT_EQ(to.status, PieceStatus::kOk);
    const std::vector<std::byte> bytes = TestBytes(key, to.plane);
    std::memcpy(to.data, bytes.data(), bytes.size());
    const std::vector<uint64_t> sums = TestChecksums(key, to.plane);
    PushedPiece pushed;
    pushed.piece = piece;
    pushed.status = PieceStatus::kOk;
    pushed.checksums = sums;
    PieceStatus verdict = PieceStatus::kLost;
    node_->CommitPush(session_, {&pushed, 1}, {&verdict, 1});
    ASSERT_EQ(verdict, PieceStatus::kOk);
  }
  // Rounds until nothing is left to do, or the disk refuses.
  void SpillAll() {
    while (node_->SpillRound()) {
    }
  }
  LookupReply::Block Look(uint64_t ticket, const BlockName& name, const std::string& tenant = "") {
    const auto found = node_->Lookup({session_, tickets_.Make(ticket, 1, tenant), {name}});
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? found->blocks[0] : LookupReply::Block();
  }
  PromoteReply::Outcome Promote(uint64_t ticket, uint64_t record) {
    PromoteRequest request{session_, Ref(ticket), {record}, absl::ZeroDuration()};
    const auto first = node_->Promote(request);
    EXPECT_TRUE(first.ok()) << first.status();
    if (first->outcomes[0] != PromoteReply::Outcome::kLate) return first->outcomes[0];
    EXPECT_TRUE(node_->PromoteRound());
    const auto second = node_->Promote(request);
    return second.ok() ? second->outcomes[0] : PromoteReply::Outcome::kLost;
  }
  // What a pull of the whole record says; checks the bytes that it is given.
  PieceStatus Pull(uint64_t ticket, const BlockKey& key, uint64_t record) {
    const Piece piece = PieceOf(ticket, record);
    ResolvedPull pull;
    node_->ResolvePull(session_, {&piece, 1}, {&pull, 1});
    if (pull.status != PieceStatus::kOk) return pull.status;
    const std::vector<std::byte> bytes = TestBytes(key, PlaneOfRecord(record));
    EXPECT_EQ(std::memcmp(pull.data, bytes.data(), bytes.size()), 0) << "foreign bytes";
    node_->ReleasePull(session_, {&piece, 1});
    return pull.status;
  }
  // Planes of the block that can be had, one way or the other.
  int Readable(uint64_t ticket, const BlockName& name) {
    const LookupReply::Block found = Look(ticket, name);
    int readable = 0;
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      if (found.presence == BlockPresence::kAbsent) continue;
      if (plane == Plane::kResidual && found.presence != BlockPresence::kExact) continue;
      const uint64_t record = PlaneRecordHandle(found.place.handle, plane);
      PieceStatus status = Pull(ticket, name.key, record);
      if (status == PieceStatus::kOnDisk &&
          Promote(ticket, record) == PromoteReply::Outcome::kResident) {
        status = Pull(ticket, name.key, record);
      }
      readable += status == PieceStatus::kOk ? 1 : 0;
    }
    (void)node_->Release({session_, Ref(ticket)});
    return readable;
  }

 private:
  static Piece PieceOf(uint64_t ticket, uint64_t record) {
    Piece piece;
    piece.ticket = ticket;
    piece.ticket_epoch = 1;
    piece.handle = record;
    piece.length = TestGeometry().RecordBytes();
    return piece;
  }

  const TicketMaker& tickets_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<MemorySpillStore> disk_;
  std::unique_ptr<StoreNode> node_;
  absl::Status attached_;
  SessionId session_;
};

// The allocator's truth (F17): what holds the arena sums to what is used.
inline void ExpectBytesSum(const StoreStats& stats) {
  EXPECT_EQ(stats.used_bytes, stats.resident_bytes[0] + stats.resident_bytes[1] +
                                  stats.reserved_bytes + stats.writing_bytes +
                                  stats.evicting_bytes + stats.promote_queue_bytes);
  EXPECT_LE(stats.used_bytes, stats.capacity_bytes);
}

}  // namespace kvt
