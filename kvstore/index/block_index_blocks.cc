// What happens to blocks: transfers, sealing, pins, eviction. What tickets ask for: block_index.cc.
#include <algorithm>

#include "kernels/base/check.h"
#include "kvstore/index/block_index.h"
#include "kvstore/index/eviction_plan.h"
#include "kvstore/index/limits.h"

namespace kvt {

bool BlockIndex::Pin(Holder& holder, uint32_t number) {
  if (!holder.pins.emplace(number, holder.pins_made).second) return false;
  ++holder.pins_made;
  ++counters_.pins;
  if (++table_.At(number).pins == 1) {
    ++counters_.pinned_blocks;
    TakeFromOrder(number);
  }
  return true;
}

void BlockIndex::Unpin(Holder& holder, uint32_t number) {
  KVT_CHECK(holder.pins.erase(number) == 1, "block ", number);
  --counters_.pins;
  if (--table_.At(number).pins > 0) return;
  --counters_.pinned_blocks;
  Settle(number);
}

void BlockIndex::TakeFromOrder(uint32_t number) {
  if (table_.At(number).in_order) order_.Remove(number);
}

void BlockIndex::Settle(uint32_t number) {
  const Block& block = table_.At(number);
  if (block.pins > 0 || block.IsInFlight()) return;
  if (block.state == BlockState::kEvicting || !block.indexed) {
    Discard(number);
  } else {
    order_.Add(number);
  }
}

void BlockIndex::Unindex(uint32_t number) {
  Block& block = table_.At(number);
  if (!block.indexed) return;
  sealed_.erase(block.key);
  block.indexed = false;
}

void BlockIndex::Condemn(uint64_t block_handle) {
  const uint32_t number = BlockNumberOf(block_handle);
  const Block* const block = table_.Find(number, GenerationOfHandle(block_handle));
  if (block == nullptr || !block->indexed) return;
  TakeFromOrder(number);
  Unindex(number);
  Settle(number);
}

void BlockIndex::Discard(uint32_t number) {
  Block& block = table_.At(number);
  if (block.state == BlockState::kWriting) arrivals_.End(block.arrivals);
  if (block.IsInFlight()) {
    table_.SetState(number, BlockState::kEvicting);
  } else {
    table_.Free(number);
  }
}

void BlockIndex::Evict(uint32_t number) {
  TakeFromOrder(number);
  Unindex(number);
  Discard(number);
  ++counters_.evicted_blocks;
}

bool BlockIndex::TryMakeRoom(RecordAllocator::ClassId cls, uint64_t blocks) {
  const auto victims = PlanEviction(table_, order_, allocator_, cls, blocks);
  if (!victims.has_value()) return false;
  for (const uint32_t number : *victims) Evict(number);
  KVT_CHECK(allocator_.Available(cls) >= blocks * kPlanes && table_.NumbersLeft() >= blocks,
            "plan for ", blocks, " blocks");
  return true;
}

void BlockIndex::AddRoom(TicketEntry& ticket, uint64_t blocks) {
  for (uint64_t i = 0; i < blocks; ++i) ticket.room.push_back(table_.Allocate(ticket.cls));
  counters_.output_reserved_blocks += blocks;
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
  if (want + ticket.room.size() > allocator_.CapacityOf(ticket.cls) / kPlanes) return false;
  if (!turn_.TryTake(now, id, now - aged->waited)) return false;
  aged->pending = true;
  // Room is made for all of a step or nothing of it: halving finds what there is.
  uint64_t left = want;
  for (uint64_t step = left / 2; step > 0;) {
    if (step <= left && TryMakeRoom(ticket.cls, step)) {
      AddRoom(ticket, step);
      left -= step;
    } else {
      step /= 2;
    }
  }
  return true;
}

void BlockIndex::NameBlock(uint32_t number, const BlockName& name, const Holder& holder,
                           const TicketEntry& ticket) {
  Block& block = table_.At(number);
  block.key = name.key;
  block.parent = name.parent;
  std::copy(name.tokens.begin(), name.tokens.end(), block.tokens.begin());
  block.token_count = static_cast<uint8_t>(name.tokens.size());
  block.provenance = name.provenance;
  block.ticket_private = name.ticket_private;
  block.space = ticket.space;
  block.domain = ticket.domain;
  block.ticket = holder.ticket;
  block.session = holder.session;
}

uint32_t BlockIndex::FindWinner(const Block& block, const TicketEntry& ticket) const {
  const auto it = sealed_.find(block.key);
  if (it == sealed_.end()) return kNoBlock;
  const Block& other = table_.At(it->second);
  const bool same = other.HasPlane(Plane::kResidual) && other.space == ticket.space &&
                    other.domain == ticket.domain && other.provenance == block.provenance &&
                    other.ticket_private == block.ticket_private &&
                    (!block.ticket_private || other.ticket == block.ticket) &&
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
  // it.
  if (const auto it = sealed_.find(block.key); it != sealed_.end()) {
    const uint32_t less = it->second;
    TakeFromOrder(less);
    Unindex(less);
    if (table_.At(less).pins == 0) Discard(less);
  }
  arrivals_.End(block.arrivals);
  holder->reservations.erase(block.key);
  table_.SetState(number, BlockState::kSealed);
  sealed_.emplace(block.key, number);
  block.indexed = true;
  block.last_ticket = block.ticket;
  if (block.ticket_private) ticket->privates.push_back(table_.HandleOf(number));
  Pin(*holder, number);
}

Access BlockIndex::WhyNotHeld(SessionId session) {
  return sessions_.Find(session) == nullptr ? Access::kExpired : Access::kRefused;
}

Access BlockIndex::BeginRead(SessionId session, const RecordRange& range, uint64_t* arena_offset) {
  const Holder* const holder = tickets_.FindHolder(session, range.ticket, range.epoch);
  if (holder == nullptr) return WhyNotHeld(session);
  const uint32_t number = BlockOfRecord(range.record_handle);
  const Plane plane = PlaneOfRecord(range.record_handle);
  const auto p = static_cast<size_t>(plane);
  Block* const block = table_.Find(number, GenerationOfHandle(range.record_handle));
  if (block == nullptr || block->state != BlockState::kSealed || !block->HasPlane(plane)) {
    return Access::kLost;
  }
  if (!holder->pins.contains(number)) return Access::kRefused;
  const uint32_t record_bytes = allocator_.RecordBytes(block->cls);
  if (range.length == 0 || range.offset > record_bytes ||
      range.length > record_bytes - range.offset) {
    return Access::kInvalid;
  }
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
  const uint32_t slice = geometries_[block->space].SliceBytes();
  const uint32_t record_bytes = allocator_.RecordBytes(block->cls);
  if (range.length == 0 || range.offset % slice != 0 || range.length % slice != 0 ||
      range.offset > record_bytes || range.length > record_bytes - range.offset) {
    return Access::kInvalid;
  }
  if (block->state == BlockState::kReserved) {
    block->arrivals = arrivals_.Start(geometries_[block->space].SlicesPerRecord());
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
  const uint32_t slice = geometries_[block->space].SliceBytes();
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
  if (block == nullptr || !block->in_order || !block->HasPlane(Plane::kResidual)) return false;
  table_.DropResidual(number);
  return true;
}

void BlockIndex::CheckInvariants() {
  std::array<uint64_t, kBlockStates> bytes{};
  uint64_t pins = 0, pinned = 0, in_flight = 0, in_order = 0, indexed = 0, unnamed = 0;
  absl::flat_hash_map<uint64_t, uint32_t> owner;  // record offset -> block
  for (uint32_t number = 0; number < table_.NumbersEnd(); ++number) {
    const Block& block = table_.At(number);
    if (block.state == BlockState::kFree) continue;
    for (size_t p = 0; p < kPlanes; ++p) {
      in_flight += block.in_flight[p] > 0 ? 1 : 0;
      if (block.offset[p] == kNoOffset) continue;
      KVT_CHECK(owner.emplace(block.offset[p], number).second, "record in two blocks: ", number);
      bytes[static_cast<size_t>(block.state)] += allocator_.RecordBytes(block.cls);
    }
    pins += block.pins;
    pinned += block.pins > 0 ? 1 : 0;
    in_order += block.in_order ? 1 : 0;
    indexed += block.indexed ? 1 : 0;
    unnamed += block.token_count == 0 ? 1 : 0;
    const bool sealed = block.state == BlockState::kSealed;
    KVT_CHECK(block.in_order == (sealed && block.pins == 0 && !block.IsInFlight()), number);
    KVT_CHECK(sealed || (block.pins == 0 && !block.indexed), number);
    KVT_CHECK(block.state != BlockState::kEvicting || block.IsInFlight(), number);
    if (block.indexed) {
      const auto it = sealed_.find(block.key);
      KVT_CHECK(it != sealed_.end() && it->second == number, number);
    }
  }
  const IndexStats stats = Stats();
  KVT_CHECK(pins == stats.pins && pinned == stats.pinned_blocks && in_flight == stats.in_flight,
            pins, " ", pinned, " ", in_flight);
  KVT_CHECK(in_order == order_.size() && indexed == sealed_.size());
  KVT_CHECK(unnamed == stats.output_reserved_blocks, unnamed);
  KVT_CHECK(bytes[static_cast<size_t>(BlockState::kReserved)] == stats.reserved_bytes &&
            bytes[static_cast<size_t>(BlockState::kWriting)] == stats.writing_bytes &&
            bytes[static_cast<size_t>(BlockState::kEvicting)] == stats.evicting_bytes &&
            bytes[static_cast<size_t>(BlockState::kSealed)] ==
                stats.resident_bytes[0] + stats.resident_bytes[1]);
  KVT_CHECK(stats.used_bytes == stats.resident_bytes[0] + stats.resident_bytes[1] +
                                    stats.reserved_bytes + stats.writing_bytes +
                                    stats.evicting_bytes);
  KVT_CHECK(stats.used_bytes <= stats.capacity_bytes);
}

}  // namespace kvt
