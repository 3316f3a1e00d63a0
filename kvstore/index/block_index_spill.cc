// The second medium: what goes to disk, comes back and is erased. The rest: block_index_blocks.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/index/block_index.h"
#include "kvstore/index/limits.h"

namespace kvt {

struct BlockIndex::SpillBatch {
  absl::Time now;
  uint64_t bytes_max = 0;
  uint64_t bytes = 0;
  bool full = false;
  std::vector<SpillJob>* jobs = nullptr;
};

void BlockIndex::TakeSpills(absl::Time now, uint64_t bytes_max, std::vector<SpillJob>* out) {
  out->clear();
  if (!disk_.writable) return;
  if (IsPressed()) disk_.pressed = true;
  SpillBatch batch{now, bytes_max, 0, false, out};
  if (disk_.pressed) SpillCold(batch);
  if (disk_.starved.records > 0 && !batch.full) SpillPinned(batch);
}

void BlockIndex::SpillCold(SpillBatch& batch) {
  const uint64_t capacity = allocator_.capacity_bytes();
  const uint64_t low =
      std::min(static_cast<uint64_t>(options_.low_watermark * static_cast<double>(capacity)),
               capacity - std::min(capacity, std::exchange(disk_.awaited_bytes, 0)));
  // What is under way to disk will be free soon.
  const auto excess = [&]() -> uint64_t {
    const uint64_t settled = allocator_.taken_bytes() - disk_.leaving_bytes;
    return settled > low ? settled - low : 0;
  };
  const auto beyond_share = [&] { return DigestExcess(allocator_.DigestBytes(), capacity); };
  if (beyond_share() > 0) {
    SpillColdOf(batch, true, [&] { return std::min(excess(), beyond_share()); });
  }
  SpillColdOf(batch, false, excess);
  // What KV is under way to disk may leave in the next round.
  if (disk_.spilling.empty()) SpillColdOf(batch, true, excess);
  if (excess() == 0 && !batch.full) disk_.pressed = IsPressed() || disk_.leaving_bytes > 0;
}

// Of digests or of KV alone, until `excess` bytes are none.
void BlockIndex::SpillColdOf(SpillBatch& batch, bool digests,
                             absl::FunctionRef<uint64_t()> excess) {
  const EvictionRules rules = Rules(batch.now);
  std::vector<uint32_t> numbers;
  const std::array<Plane, kPlanes> planes =
      digests ? std::array{Plane::kBase, Plane::kResidual}  // one half is of no use
              : std::array{Plane::kResidual, Plane::kBase};
  for (const ListKind kind : {ListKind::kOnce, ListKind::kAgain}) {
    for (const Plane plane : planes) {
      const bool both = digests && plane == Plane::kBase;
      for (RecordAllocator::ClassId cls = 0; cls < order_.classes(); ++cls) {
        if (allocator_.IsDigests(cls) != digests) continue;
        uint64_t wanted = excess();
        if (wanted == 0 || batch.full) break;
        // Acting changes the list: first choose, then act.
        const uint64_t bytes = allocator_.RecordBytes(cls) * (both ? kPlanes : 1);
        uint64_t skipped = 0;
        numbers.clear();
        order_.Walk(cls, plane, kind, [&](uint32_t number) {
          if (!MayLeave(table_.At(number), plane)) return ++skipped < kEvictionSkipsMax;
          numbers.push_back(number);
          wanted -= std::min(wanted, bytes);
          return wanted > 0 && numbers.size() < kEvictionSkipsMax;
        });
        for (const uint32_t number : numbers) {
          const Block& block = table_.At(number);
          if (block.state != BlockState::kSealed || !MayLeave(block, plane)) continue;
          if (block.OnDisk(plane) || !DeservesDisk(block, rules)) {
            GiveUp(PlaneRecordHandle(table_.HandleOf(number), plane));
            continue;
          }
          // The BASE goes along, though it stays in memory: a RESIDUAL alone on disk is worth
          // nothing after a crash.
          if (!digests && plane == Plane::kResidual && !block.OnDisk(Plane::kBase)) {
            AddSpill(batch, number, Plane::kBase, /*leave=*/false);
          }
          AddSpill(batch, number, plane, /*leave=*/true);
          if (both) AddSpill(batch, number, Plane::kResidual, /*leave=*/true);
          if (batch.full) break;
        }
      }
    }
  }
}

void BlockIndex::SpillPinned(SpillBatch& batch) {
  const uint64_t available = allocator_.Available(disk_.starved.cls);
  uint64_t wanted = disk_.starved.records - std::min(disk_.starved.records, available);
  std::vector<uint32_t> numbers;
  for (const Plane plane : {Plane::kResidual, Plane::kBase}) {
    const auto p = static_cast<size_t>(plane);
    numbers.clear();
    order_.Walk(disk_.starved.cls, plane, ListKind::kHeld, [&](uint32_t number) {
      const Block& block = table_.At(number);
      if (wanted == 0) return false;
      if (block.hold_until > batch.now) return true;
      if (block.on_disk[p] || block.moving[p] == Moving::kSpilling) {
        --wanted;  // can leave already, or soon
      } else if (block.indexed && !block.purged && block.moving[p] == Moving::kNone) {
        numbers.push_back(number);
        --wanted;
      }
      return true;
    });
    for (const uint32_t number : numbers) {
      if (plane == Plane::kResidual) AddSpill(batch, number, Plane::kBase, /*leave=*/false);
      AddSpill(batch, number, plane, /*leave=*/false);
      if (batch.full) return;  // the rest next time
    }
  }
  disk_.starved = RoomNeed();
}

bool BlockIndex::AddSpill(SpillBatch& batch, uint32_t number, Plane plane, bool leave) {
  const auto p = static_cast<size_t>(plane);
  Block& block = table_.At(number);
  if (!block.indexed || !block.InMemory(plane) || block.on_disk[p] ||
      block.moving[p] != Moving::kNone) {
    return false;
  }
  const uint32_t record_bytes = allocator_.RecordBytes(block.cls);
  if (!batch.jobs->empty() && batch.bytes + record_bytes > batch.bytes_max) {
    batch.full = true;
    return false;
  }
  // Room on disk may cost this very block its place there, or everything.
  if (!TryMakeDiskRoom(block.domain, record_bytes) || !block.indexed || !block.InMemory(plane)) return false;
  const uint64_t record = PlaneRecordHandle(table_.HandleOf(number), plane);
  block.moving[p] = Moving::kSpilling;
  disk_.spilling.emplace(record, leave);
  disk_.spilling_bytes += record_bytes;
  disk_.domain_spilling[block.domain] += record_bytes;
  if (leave) disk_.leaving_bytes += record_bytes;
  batch.bytes += record_bytes;
  batch.jobs->push_back(SpillJob{record, block.key, block.offset[p], record_bytes});
  return true;
}

bool BlockIndex::TryMakeDiskRoom(uint32_t domain, uint64_t bytes) {
  if (options_.tenant_disk_bytes_max != 0) {
    const auto used = [&] {
      const auto spilling = disk_.domain_spilling.find(domain);
      return table_.OfDomain(domain).disk +
             (spilling == disk_.domain_spilling.end() ? 0 : spilling->second);
    };
    while (used() + bytes > options_.tenant_disk_bytes_max) {
      const uint64_t digests = table_.OfDomain(domain).digest_disk;
      if (!TryShedDisk(domain, DigestExcess(digests, options_.tenant_disk_bytes_max) > 0)) {
        return false;
      }
    }
  }
  uint64_t limit = options_.disk_bytes_max;
  if (disk_.limit_bytes != 0) limit = limit == 0 ? disk_.limit_bytes : std::min(limit, disk_.limit_bytes);
  if (limit == 0) return true;
  while (table_.DiskBytesOf(Plane::kBase) + table_.DiskBytesOf(Plane::kResidual) +
             disk_.spilling_bytes + bytes > limit) {
    if (!TryShedDisk(std::nullopt, DigestExcess(table_.DigestDiskBytes(), limit) > 0)) return false;
  }
  return true;
}

// False: all are busy. With `digests`, which have more than their share, KV only when there are none.
bool BlockIndex::TryShedDisk(std::optional<uint32_t> domain, bool digests) {
  uint32_t victim = kNoBlock;
  const auto find = [&](bool of_digests) {
    uint64_t skipped = 0;
    order_.WalkDisk(of_digests, [&](uint32_t number) {
      const Block& block = table_.At(number);
      if (block.IsBusy()) return ++skipped < kEvictionSkipsMax;
      if (domain.has_value() && block.domain != *domain) return ++skipped < kTenantSkipsMax;
      victim = number;
      return false;
    });
  };
  if (digests) find(true);
  if (victim == kNoBlock) find(false);
  if (victim == kNoBlock) return false;
  const Block& block = table_.At(victim);
  if (!block.InMemory(Plane::kBase)) {
    Evict(victim);
    return true;
  }
  for (const Plane plane : {Plane::kResidual, Plane::kBase}) {
    if (!block.OnDisk(plane)) continue;
    if (!block.InMemory(plane)) ++counters_.dropped[static_cast<size_t>(plane)];
    LeaveDisk(victim, plane);
  }
  return true;
}

void BlockIndex::LeaveDisk(uint32_t number, Plane plane) {
  table_.SetOnDisk(number, plane, false);
  const Block& block = table_.At(number);
  disk_.erasures.push_back(DiskErasure{block.key, plane});
  if (plane == Plane::kBase && !block.InMemory(plane)) Unindex(number);
  Settle(number);
}

void BlockIndex::EndSpill(absl::Time, uint64_t record_handle, bool written) {
  const auto it = disk_.spilling.find(record_handle);
  KVT_CHECK(it != disk_.spilling.end(), "record ", record_handle);
  const bool leave = it->second;
  disk_.spilling.erase(it);
  const uint32_t number = BlockOfRecord(record_handle);
  const Plane plane = PlaneOfRecord(record_handle);
  const auto p = static_cast<size_t>(plane);
  Block* const block = table_.Find(number, GenerationOfHandle(record_handle));
  KVT_CHECK(block != nullptr && block->moving[p] == Moving::kSpilling, "record ", record_handle);
  const uint64_t record_bytes = allocator_.RecordBytes(block->cls);
  disk_.spilling_bytes -= record_bytes;
  const auto spilling = disk_.domain_spilling.find(block->domain);
  if ((spilling->second -= record_bytes) == 0) disk_.domain_spilling.erase(spilling);
  if (leave) disk_.leaving_bytes -= record_bytes;
  block->moving[p] = Moving::kNone;
  if (written && block->indexed) {
    table_.SetOnDisk(number, plane, true);
    ++counters_.spilled[p];
    // Unless someone took it up meanwhile.
    if (leave && !block->IsHeld() && MayLeave(*block, plane)) table_.FreeRecord(number, plane);
  } else if (written) {
    disk_.erasures.push_back(DiskErasure{block->key, plane});
  }
  Settle(number);
}

PromoteBegin BlockIndex::BeginPromote(absl::Time now, SessionId session, LiveTicket ticket,
                                      uint64_t record_handle, PromoteJob* job) {
  const Holder* const holder = tickets_.FindHolder(session, ticket.id, ticket.epoch);
  const uint32_t number = BlockOfRecord(record_handle);
  const Plane plane = PlaneOfRecord(record_handle);
  const auto p = static_cast<size_t>(plane);
  Block* const block = table_.Find(number, GenerationOfHandle(record_handle));
  if (holder == nullptr || block == nullptr || block->state != BlockState::kSealed ||
      !holder->pins.contains(number) || !block->HasPlane(plane)) {
    return PromoteBegin::kLost;
  }
  if (block->InMemory(plane)) return PromoteBegin::kResident;
  if (block->moving[p] == Moving::kPromoting) return PromoteBegin::kRunning;
  if (!TryMakeRoom(now, RoomNeed{block->cls, 1, 0, plane == Plane::kBase}))
    return PromoteBegin::kNoRoom;
  block->moving[p] = Moving::kPromoting;
  const uint64_t offset = table_.AllocateLanding(number);
  disk_.landings.emplace(record_handle, offset);
  *job = PromoteJob{record_handle, block->key, offset, allocator_.RecordBytes(block->cls)};
  return PromoteBegin::kStarted;
}

void BlockIndex::EndPromote(absl::Time now, uint64_t record_handle, bool loaded) {
  const auto it = disk_.landings.find(record_handle);
  KVT_CHECK(it != disk_.landings.end(), "record ", record_handle);
  const uint64_t offset = it->second;
  disk_.landings.erase(it);
  const uint32_t number = BlockOfRecord(record_handle);
  const Plane plane = PlaneOfRecord(record_handle);
  const auto p = static_cast<size_t>(plane);
  Block* const block = table_.Find(number, GenerationOfHandle(record_handle));
  KVT_CHECK(block != nullptr && block->moving[p] == Moving::kPromoting, "record ", record_handle);
  block->moving[p] = Moving::kNone;
  const bool wanted = block->state == BlockState::kSealed && block->OnDisk(plane);
  if (wanted && loaded) {
    table_.InstallLanding(number, plane, offset);
    block->hold_until = now + options_.promoted_hold;
    ++counters_.promoted[p];
    Settle(number);
    return;
  }
  table_.FreeLanding(number, offset);
  if (wanted) {
    ++counters_.lost_on_disk;
    LeaveDisk(number, plane);
  } else {
    Settle(number);
  }
}

void BlockIndex::TakeErasures(size_t erasures_max, std::vector<DiskErasure>* out) {
  out->clear();
  while (!disk_.erasures.empty() && out->size() < erasures_max) {
    const DiskErasure erasure = disk_.erasures.front();
    disk_.erasures.pop_front();
    // What was written again since it was to go is to stay.
    const auto it = sealed_.find(erasure.key);
    if (it == sealed_.end() || !table_.At(it->second).OnDisk(erasure.plane)) {
      out->push_back(erasure);
    }
  }
}

absl::StatusOr<uint64_t> BlockIndex::RestoreBlock(const RestoredBlock& restored) {
  const BlockName& name = restored.name;
  if (name.ticket_private || name.tokens.size() != kBlockTokens) {
    return absl::FailedPreconditionError("a block of a ticket that is gone");
  }
  if (sealed_.contains(name.key)) return absl::AlreadyExistsError("another block has its key");
  if (table_.NumbersLeft() == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this store numbers at most ", options_.blocks_max, " blocks"));
  }
  KVT_ASSIGN_OR_RETURN(const uint32_t space, SpaceOf(restored.model_fingerprint,
                                                     restored.numerics_id, restored.geometry));
  KVT_ASSIGN_OR_RETURN(const uint32_t domain, domains_.Intern(restored.tenant));
  KVT_ASSIGN_OR_RETURN(const RecordAllocator::ClassId cls,
                       ClassOf(restored.geometry));
  const uint32_t number = table_.AllocateEmpty(cls, domain);
  Block& block = table_.At(number);
  block.TakeName(name);
  block.space = space;
  block.incarnation = restored.incarnation;
  block.reused = true;  // as it was when it was written
  block.indexed = true;
  sealed_.emplace(block.key, number);
  table_.SetOnDisk(number, Plane::kBase, true);
  order_.Place(number);
  return table_.HandleOf(number);
}

absl::StatusOr<uint64_t> BlockIndex::RestoreResidual(const BlockKey& key, uint64_t incarnation) {
  const auto it = sealed_.find(key);
  if (it == sealed_.end()) return absl::NotFoundError("its BASE is not there");
  const Block& block = table_.At(it->second);
  if (block.incarnation != incarnation || block.HasPlane(Plane::kResidual)) {
    return absl::FailedPreconditionError("its BASE is of another incarnation");
  }
  table_.SetOnDisk(it->second, Plane::kResidual, true);
  order_.Place(it->second);
  return table_.HandleOf(it->second);
}

}  // namespace kvt
