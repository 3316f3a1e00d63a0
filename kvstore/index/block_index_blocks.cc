// What happens to blocks: transfers, sealing, pins, eviction. What tickets ask for: block_index.cc.
#include <algorithm>

#include "kernels/base/check.h"
#include "kvstore/index/block_index.h"
#include "kvstore/index/eviction_plan.h"
#include "kvstore/index/limits.h"

namespace kvt {

// False when the holder has the pin already.
bool BlockIndex::Pin(Holder& holder, uint32_t number) {
  if (!holder.pins.emplace(number, holder.pins_made).second) return false;
  ++holder.pins_made;
  ++counters_.pins;
  Block& block = table_.At(number);
  block.pinner = &holder;
  if (++block.pins == 1) {
    ++counters_.pinned_blocks;
    order_.Place(number);
  }
  return true;
}

void BlockIndex::Unpin(Holder& holder, uint32_t number) {
  KVT_CHECK(holder.pins.erase(number) == 1, "block ", number);
  --counters_.pins;
  Block& block = table_.At(number);
  if (block.pinner == &holder) block.pinner = nullptr;
  if (--block.pins > 0) return;
  --counters_.pinned_blocks;
  Settle(number);
}

void BlockIndex::Settle(uint32_t number) {
  const Block& block = table_.At(number);
  if (block.state == BlockState::kSealed && (block.IsHeld() || block.indexed)) {
    order_.Place(number);
  } else if (!block.IsHeld()) {
    Discard(number);
  }
}

void BlockIndex::Unindex(uint32_t number) {
  Block& block = table_.At(number);
  if (!block.indexed) return;
  sealed_.erase(block.key);
  block.indexed = false;
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    if (!block.OnDisk(plane)) continue;
    table_.SetOnDisk(number, plane, false);
    disk_.erasures.push_back(DiskErasure{block.key, plane});
  }
}

void BlockIndex::Condemn(uint64_t block_handle) {
  const uint32_t number = BlockNumberOf(block_handle);
  const Block* const block = table_.Find(number, GenerationOfHandle(block_handle));
  if (block == nullptr) return;
  TicketEntry* const ticket = tickets_.Find(block->ticket);
  if (ticket != nullptr && block->unpublished && !block->indexed) ticket->aside.erase(block->key);
  if (!block->indexed) return;
  Unindex(number);
  Settle(number);
}

void BlockIndex::Discard(uint32_t number) {
  Block& block = table_.At(number);
  if (block.state == BlockState::kWriting) arrivals_.End(block.arrivals);
  if (block.state == BlockState::kSealed) order_.Remove(number);
  if (!block.IsBusy()) {
    table_.Free(number);
  } else if (block.state != BlockState::kEvicting) {
    table_.SetState(number, BlockState::kEvicting);
  }
}

void BlockIndex::Evict(uint32_t number) {
  const Block& block = table_.At(number);
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    if (block.HasPlane(plane)) ++counters_.dropped[static_cast<size_t>(plane)];
  }
  Unindex(number);
  Discard(number);
  ++counters_.evicted_blocks;
}

EvictionRules BlockIndex::Rules(absl::Time now) const {
  EvictionRules rules;
  rules.planes_apart = options_.has_disk;
  rules.disk = disk_.writable;
  rules.spill_one_time = options_.spill_one_time;
  rules.now = now;
  return rules;
}

void BlockIndex::GiveUp(uint64_t record_handle) {
  const uint32_t number = BlockOfRecord(record_handle);
  const Plane plane = PlaneOfRecord(record_handle);
  const Block* const block = table_.Find(number, GenerationOfHandle(record_handle));
  if (block == nullptr || block->state != BlockState::kSealed || !MayLeave(*block, plane)) return;
  if (plane == Plane::kBase && !block->OnDisk(plane)) {
    Evict(number);
    return;
  }
  if (!block->OnDisk(plane)) ++counters_.dropped[static_cast<size_t>(plane)];
  table_.FreeRecord(number, plane);
  order_.Place(number);
}

bool BlockIndex::TryMakeRoom(absl::Time now, const RoomNeed& need, AgedAsk* ask) {
  EvictionRules rules = Rules(now);
  rules.spare_unspilled = ask != nullptr && ask->spare_unspilled;
  // A search for whole slabs that found none is not worth repeating for each reservation.
  rules.floors = now >= floors_again_;
  const auto plan = PlanEviction(table_, order_, allocator_, need, rules);
  if (rules.floors && (!plan.has_value() || plan->floor_missed)) floors_again_ = now + kFloorPause;
  if (!plan.has_value() && rules.spare_unspilled) {
    rules.spare_unspilled = false;
    const uint64_t bytes = need.records * allocator_.RecordBytes(need.cls);
    ask->spill_helps = disk_.leaving_bytes >= bytes ||
                       PlanEviction(table_, order_, allocator_, need, rules).has_value();
    if (ask->spill_helps) {
      disk_.awaited_bytes = std::max(disk_.awaited_bytes, bytes);
      disk_.pressed = true;
      return false;
    }
  }
  if (!plan.has_value()) {
    const bool more = need.cls != disk_.starved.cls || need.records > disk_.starved.records;
    if (options_.has_disk && more && need.records <= allocator_.CapacityOf(need.cls)) {
      disk_.starved = need;
    }
    return false;
  }
  for (const uint64_t record : plan->records) GiveUp(record);
  for (const uint32_t number : plan->blocks) Evict(number);
  KVT_CHECK(allocator_.Available(need.cls) >= need.records && table_.NumbersLeft() >= need.blocks,
            "plan for ", need.records, " records");
  return true;
}

void BlockIndex::AddRoom(TicketEntry& ticket, uint64_t blocks) {
  for (uint64_t i = 0; i < blocks; ++i)
    ticket.room.push_back(table_.Allocate(ticket.room_cls, ticket.domain));
  counters_.output_reserved_blocks += blocks;
}

uint32_t BlockIndex::TakeBlock(TicketEntry& ticket, const Holder& holder) {
  if (ticket.room_cls != holder.cls || ticket.room.empty()) {
    return table_.Allocate(holder.cls, ticket.domain);
  }
  const uint32_t number = ticket.room.back();
  ticket.room.pop_back();
  --counters_.output_reserved_blocks;
  return number;
}

void BlockIndex::TrimRoom(TicketEntry& ticket, uint64_t blocks) {
  while (ticket.room.size() > blocks) {
    table_.Free(ticket.room.back());
    ticket.room.pop_back();
    --counters_.output_reserved_blocks;
  }
}

bool BlockIndex::TryKeepPart(absl::Time now, TicketId id, TicketEntry& ticket, uint64_t want,
                             AgedAsk* aged) {
  if (aged == nullptr || aged->waited <= absl::ZeroDuration()) return false;
  if (want + ticket.room.size() > allocator_.CapacityOf(ticket.room_cls) / kPlanes) return false;
  if (!turn_.TryTake(now, id, now - aged->waited)) return false;
  aged->pending = true;
  // Room is made for all of a step or nothing of it: halving finds what there is.
  uint64_t left = want;
  for (uint64_t step = left / 2; step > 0;) {
    if (step <= left && TryMakeRoom(now, RoomNeed{ticket.room_cls, step * kPlanes, step})) {
      AddRoom(ticket, step);
      left -= step;
    } else {
      step /= 2;
    }
  }
  return true;
}

void BlockIndex::NameBlock(uint32_t number, const BlockName& name, const Holder& holder) {
  Block& block = table_.At(number);
  block.TakeName(name);
  block.ticket_private = name.ticket_private;
  block.unpublished = name.provenance != Provenance::kExact && !name.ticket_private;
  block.space = holder.space;
  block.ticket = holder.ticket;
  block.session = holder.session;
}

uint32_t BlockIndex::FindWinner(const Block& block, const TicketEntry& ticket) const {
  const auto it = sealed_.find(block.key);
  if (it == sealed_.end()) return kNoBlock;
  const Block& other = table_.At(it->second);
  const bool same = other.HasPlane(Plane::kResidual) && other.space == block.space &&
                    other.domain == ticket.domain && other.provenance == block.provenance &&
                    other.ticket_private == block.ticket_private &&
                    !other.IsHiddenFrom(block.ticket) &&
                    other.parent == block.parent && other.token_count == block.token_count &&
                    other.tokens == block.tokens;
  return same ? it->second : kNoBlock;
}

void BlockIndex::YieldTo(Holder& holder, uint32_t number, uint32_t winner) {
  holder.winners[table_.HandleOf(number)] = table_.HandleOf(winner);
  holder.reservations.erase(table_.At(number).key);
  Pin(holder, winner);
  Discard(number);
}

void BlockIndex::SealBlock(uint32_t number) {
  Block& block = table_.At(number);
  TicketEntry* const ticket = tickets_.Find(block.ticket);
  Holder* const holder = ticket == nullptr ? nullptr : ticket->HolderIn(block.session);
  KVT_CHECK(holder != nullptr, "block ", number, " has no writer");
  if (const uint32_t winner = FindWinner(block, *ticket); winner != kNoBlock) {
    YieldTo(*holder, number, winner);
    return;
  }
  // What else bears the key is less: BASE alone, or not this content. It stays for those who pin
  // it. But another living ticket's approximate block keeps its place.
  bool found = !block.purged;
  if (const auto it = sealed_.find(block.key); it != sealed_.end() && found) {
    const uint32_t less = it->second;
    found = !block.unpublished || !table_.At(less).IsHiddenFrom(block.ticket);
    if (found) {
      Unindex(less);
      Settle(less);
    } else {
      ticket->aside[block.key] = table_.HandleOf(number);
    }
  }
  arrivals_.End(block.arrivals);
  holder->reservations.erase(block.key);
  table_.SetState(number, BlockState::kSealed);
  // One number per content over all boots: handles are unique in one, boots differ.
  block.incarnation = (options_.boot * 0x9e3779b97f4a7c15ull) ^ table_.HandleOf(number);
  if (found) {
    sealed_.emplace(block.key, number);
    block.indexed = true;
    if (block.ticket_private || block.unpublished) {
      ticket->privates.push_back(table_.HandleOf(number));
    }
  }
  block.last_ticket = block.ticket;
  Pin(*holder, number);
}

Access BlockIndex::WhyNotHeld(SessionId session) {
  return sessions_.Find(session) == nullptr ? Access::kExpired : Access::kRefused;
}

Access BlockIndex::BeginRead(SessionId session, const RecordRange& range, uint64_t* arena_offset,
                             ReadCursor* cursor) {
  ReadCursor own;
  if (cursor == nullptr) cursor = &own;
  if (cursor->holder == nullptr || cursor->ticket != range.ticket ||
      cursor->epoch != range.epoch) {
    *cursor = {range.ticket, range.epoch,
               tickets_.FindHolder(session, range.ticket, range.epoch)};
  }
  const Holder* const holder = cursor->holder;
  if (holder == nullptr) return WhyNotHeld(session);
  const uint32_t number = BlockOfRecord(range.record_handle);
  const Plane plane = PlaneOfRecord(range.record_handle);
  const auto p = static_cast<size_t>(plane);
  Block* const block = table_.Find(number, GenerationOfHandle(range.record_handle));
  if (block == nullptr || block->state != BlockState::kSealed || !block->HasPlane(plane)) {
    return Access::kLost;
  }
  if (block->pinner != holder && !holder->pins.contains(number)) return Access::kRefused;
  const uint32_t record_bytes = allocator_.RecordBytes(block->cls);
  if (range.length == 0 || range.offset > record_bytes ||
      range.length > record_bytes - range.offset) {
    return Access::kInvalid;
  }
  if (!block->InMemory(plane)) return Access::kOnDisk;
  if (block->in_flight[p]++ == 0) ++counters_.in_flight;
  *arena_offset = block->offset[p] + range.offset;
  return Access::kOk;
}

void BlockIndex::EndRead(uint64_t record_handle) {
  const uint32_t number = BlockOfRecord(record_handle);
  Block* const block = table_.Find(number, GenerationOfHandle(record_handle));
  const auto p = static_cast<size_t>(PlaneOfRecord(record_handle));
  KVT_CHECK(block != nullptr && block->in_flight[p] > 0, "record ", record_handle);
  if (--block->in_flight[p] > 0) return;
  --counters_.in_flight;
  // Still held: it stays where it is.
  if (block->pins > 0 && block->state == BlockState::kSealed) return;
  Settle(number);
}

Access BlockIndex::BeginWrite(SessionId session, const RecordRange& range, uint64_t* arena_offset) {
  const Holder* const holder = tickets_.FindHolder(session, range.ticket, range.epoch);
  if (holder == nullptr) return WhyNotHeld(session);
  const uint32_t number = BlockOfRecord(range.record_handle);
  const auto p = static_cast<size_t>(PlaneOfRecord(range.record_handle));
  Block* const block = table_.Find(number, GenerationOfHandle(range.record_handle));
  if (block == nullptr || !block->IsUnsealed()) return Access::kLost;
  if (block->ticket != range.ticket || block->session != session) return Access::kRefused;
  const uint32_t slice = spaces_info_[block->space].geometry.SliceBytes();
  const uint32_t record_bytes = allocator_.RecordBytes(block->cls);
  if (range.length == 0 || range.offset % slice != 0 || range.length % slice != 0 ||
      range.offset > record_bytes || range.length > record_bytes - range.offset) {
    return Access::kInvalid;
  }
  if (block->state == BlockState::kReserved) {
    block->arrivals = arrivals_.Start(spaces_info_[block->space].geometry.SlicesPerRecord());
    table_.SetState(number, BlockState::kWriting);
  }
  if (block->in_flight[p]++ == 0) ++counters_.in_flight;
  *arena_offset = block->offset[p] + range.offset;
  return Access::kOk;
}

bool BlockIndex::EndWrite(const RecordRange& range, bool arrived) {
  const uint32_t number = BlockOfRecord(range.record_handle);
  const Plane plane = PlaneOfRecord(range.record_handle);
  const auto p = static_cast<size_t>(plane);
  Block* const block = table_.Find(number, GenerationOfHandle(range.record_handle));
  KVT_CHECK(block != nullptr && block->in_flight[p] > 0, "record ", range.record_handle);
  if (--block->in_flight[p] == 0) --counters_.in_flight;
  if (block->state == BlockState::kEvicting) {
    Settle(number);
    return false;
  }
  const uint32_t slice = spaces_info_[block->space].geometry.SliceBytes();
  const uint32_t first = range.offset / slice;
  const uint32_t count = range.length / slice;
  if (arrived) {
    arrivals_.Mark(block->arrivals, plane, first, count);
  } else {
    arrivals_.Clear(block->arrivals, plane, first, count);
  }
  // While another push into it runs its bytes may still change.
  if (!block->IsInFlight() && arrivals_.IsComplete(block->arrivals)) SealBlock(number);
  return true;
}

bool BlockIndex::TryDropResidual(uint64_t block_handle) {
  const uint32_t number = BlockNumberOf(block_handle);
  const Block* const block = table_.Find(number, GenerationOfHandle(block_handle));
  if (block == nullptr || !block->indexed || block->IsHeld() || block->IsBusy() ||
      !block->HasPlane(Plane::kResidual)) {
    return false;
  }
  if (block->InMemory(Plane::kResidual)) table_.FreeRecord(number, Plane::kResidual);
  if (block->OnDisk(Plane::kResidual)) {
    LeaveDisk(number, Plane::kResidual);
  } else {
    order_.Place(number);
  }
  return true;
}

}  // namespace kvt
