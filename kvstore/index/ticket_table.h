// What each ticket holds at this store: per session its pins and unsealed reservations (a Holder),
// over all sessions its room for output and its private blocks. Storage only: BlockIndex keeps
// blocks and holders in step. Pure; not thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/base/ids.h"
#include "kvstore/index/block_key.h"
#include "kvstore/index/record_allocator.h"

namespace kvt {

// One ticket in one session.
struct Holder {
  SessionId session;
  uint32_t space = 0;                // the session's
  RecordAllocator::ClassId cls = 0;  // of the session's records
  TicketId ticket;
  TicketEpoch epoch;
  absl::flat_hash_map<uint32_t, uint32_t> pins;  // block number -> order of pinning
  uint32_t pins_made = 0;
  absl::flat_hash_map<BlockKey, uint32_t> reservations;  // unsealed: key -> block number
  // Blocks reserved here whose content another writer sealed first: handle -> the winner's.
  absl::flat_hash_map<uint64_t, uint64_t> winners;
};

struct TicketEntry {
  TicketEpoch epoch;  // highest seen; lower ones are fenced
  uint32_t space = 0;  // of its first session here; those of the others may differ in geometry alone
  uint32_t domain = 0;
  RecordAllocator::ClassId room_cls = 0;  // of `room`
  bool has_fenced = false;  // a lower epoch was seen
  bool granted = false;     // a Reserve of it was granted: it has been admitted here
  std::vector<std::unique_ptr<Holder>> holders;
  std::vector<uint32_t> room;      // numbers of unnamed blocks
  // Handles of sealed blocks that only this ticket may read: tails, which go with it, and approximate
  // blocks, which are published then.
  std::vector<uint64_t> privates;
  // Handles of its approximate blocks whose key a block of another living ticket bears: this one
  // alone finds them, and they go with their last pin.
  absl::flat_hash_map<BlockKey, uint64_t> aside;

  // Whether `room` is, or from now on may be, of the holder's geometry.
  bool ClaimRoom(const Holder& holder) {
    if (room.empty()) room_cls = holder.cls;
    return room_cls == holder.cls;
  }
  [[nodiscard]] Holder* HolderIn(SessionId session) const {
    for (const auto& holder : holders) {
      if (holder->session == session) return holder.get();
    }
    return nullptr;
  }
};

class TicketTable {
 public:
  [[nodiscard]] TicketEntry* Find(TicketId id) {
    const auto it = tickets_.find(id);
    return it == tickets_.end() ? nullptr : it->second.get();
  }
  // The holder of that very epoch, or null.
  [[nodiscard]] Holder* FindHolder(SessionId session, TicketId ticket, TicketEpoch epoch) {
    const TicketEntry* entry = Find(ticket);
    if (entry == nullptr || entry->epoch != epoch) return nullptr;
    return entry->HolderIn(session);
  }
  // Precondition: not there.
  TicketEntry& Add(TicketId id) {
    return *tickets_.emplace(id, std::make_unique<TicketEntry>()).first->second;
  }
  // Precondition: it holds nothing. A fenced epoch is remembered for a while.
  void Erase(TicketId id);
  // An epoch below which an erased ticket is fenced; zero: none known.
  [[nodiscard]] TicketEpoch FencedBelow(TicketId id) const {
    const auto it = fenced_.find(id);
    return it == fenced_.end() ? TicketEpoch() : it->second;
  }
  [[nodiscard]] size_t size() const { return tickets_.size(); }

 private:
  absl::flat_hash_map<TicketId, std::unique_ptr<TicketEntry>> tickets_;
  absl::flat_hash_map<TicketId, TicketEpoch> fenced_;
  std::deque<TicketId> fenced_order_;  // oldest first, at most kFencedTicketsMax
};

}  // namespace kvt
