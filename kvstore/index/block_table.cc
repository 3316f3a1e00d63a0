#include "kvstore/index/block_table.h"

#include <utility>

#include "kernels/base/check.h"

namespace kvt {

void BlockTable::Account(const Block& block, int sign) {
  const auto add = [sign](uint64_t& total, uint64_t amount) {
    total = sign > 0 ? total + amount : total - amount;
  };
  const uint64_t record_bytes = allocator_.RecordBytes(block.cls);
  const auto state = static_cast<size_t>(block.state);
  const bool digest = IsDigest(block);
  add(counts_[state], 1);
  if (digest) add(digest_blocks_, 1);
  for (size_t plane = 0; plane < kPlanes; ++plane) {
    if (block.offset[plane] == kNoOffset) continue;
    add(bytes_[state], record_bytes);
    add(domains_[block.domain].memory, record_bytes);
    if (digest) add(domains_[block.domain].digest_memory, record_bytes);
    if (block.state == BlockState::kSealed) add(sealed_bytes_[plane], record_bytes);
  }
}

uint32_t BlockTable::TakeNumber(RecordAllocator::ClassId cls, uint32_t domain) {
  if (domain >= domains_.size()) domains_.resize(domain + 1);
  uint32_t number;
  if (!free_.empty()) {
    number = free_.back();
    free_.pop_back();
  } else {
    KVT_CHECK(numbers_end_ < blocks_max_, "block numbers ", blocks_max_);
    number = numbers_end_++;
    if (number % kChunkBlocks == 0) chunks_.push_back(std::make_unique<Block[]>(kChunkBlocks));
  }
  Block& block = At(number);
  KVT_CHECK(block.state == BlockState::kFree);
  block.cls = cls;
  block.domain = domain;
  return number;
}

uint32_t BlockTable::Allocate(RecordAllocator::ClassId cls, uint32_t domain) {
  const uint32_t number = TakeNumber(cls, domain);
  Block& block = At(number);
  for (uint64_t& offset : block.offset) {
    const std::optional<uint64_t> record = allocator_.TryAllocate(cls);
    KVT_CHECK(record.has_value(), "no record left in class ", cls);
    offset = *record;
  }
  block.state = BlockState::kReserved;
  Account(block, 1);
  return number;
}

uint32_t BlockTable::AllocateEmpty(RecordAllocator::ClassId cls, uint32_t domain) {
  const uint32_t number = TakeNumber(cls, domain);
  At(number).state = BlockState::kSealed;
  Account(At(number), 1);
  return number;
}

void BlockTable::SetState(uint32_t number, BlockState state) {
  Block& block = At(number);
  KVT_CHECK(block.state != BlockState::kFree && state != BlockState::kFree);
  const bool was_sealed = block.state == BlockState::kSealed;
  Account(block, -1);
  block.state = state;
  Account(block, 1);
  const bool is_sealed = state == BlockState::kSealed;
  if (was_sealed == is_sealed) return;
  KVT_CHECK(!block.IsOnDisk(), "block ", number);
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    if (!block.InMemory(plane)) continue;
    const uint64_t record = PlaneRecordHandle(HandleOf(number), plane);
    if (is_sealed) {
      events_.OnSealed(record, block.offset[static_cast<size_t>(plane)]);
    } else {
      events_.OnWithdrawn(record);
    }
  }
}

void BlockTable::Free(uint32_t number) {
  Block& block = At(number);
  KVT_CHECK(block.state != BlockState::kFree && block.pins == 0 && !block.IsBusy() &&
                !block.indexed && !block.IsOnDisk(),
            "block ", number, " is in use");
  for (const ListKind kind : block.list) KVT_CHECK(kind == ListKind::kNone, "block ", number);
  if (block.state == BlockState::kSealed) SetState(number, BlockState::kEvicting);
  Account(block, -1);
  for (const uint64_t offset : block.offset) {
    if (offset != kNoOffset) allocator_.Free(offset);
  }
  const uint32_t generation = block.generation;
  block = Block();
  if (generation == UINT32_MAX) return;  // retired
  block.generation = generation + 1;
  free_.push_back(number);
}

void BlockTable::FreeRecord(uint32_t number, Plane plane) {
  Block& block = At(number);
  const auto p = static_cast<size_t>(plane);
  KVT_CHECK(block.state == BlockState::kSealed && block.InMemory(plane) &&
                block.in_flight[p] == 0 && block.moving[p] == Moving::kNone,
            "block ", number);
  const uint64_t record = PlaneRecordHandle(HandleOf(number), plane);
  if (block.on_disk[p]) {
    events_.OnMovedToDisk(record);
  } else {
    events_.OnWithdrawn(record);
  }
  Account(block, -1);
  allocator_.Free(std::exchange(block.offset[p], kNoOffset));
  Account(block, 1);
}

void BlockTable::SetOnDisk(uint32_t number, Plane plane, bool on_disk) {
  Block& block = At(number);
  const auto p = static_cast<size_t>(plane);
  KVT_CHECK(block.state == BlockState::kSealed && block.on_disk[p] != on_disk, "block ", number);
  block.on_disk[p] = on_disk;
  const uint64_t record_bytes = allocator_.RecordBytes(block.cls);
  const uint64_t record = PlaneRecordHandle(HandleOf(number), plane);
  const uint64_t digest_bytes = IsDigest(block) ? record_bytes : 0;
  if (on_disk) {
    disk_bytes_[p] += record_bytes;
    ++disk_records_[p];
    domains_[block.domain].disk += record_bytes;
    digest_disk_bytes_ += digest_bytes;
    domains_[block.domain].digest_disk += digest_bytes;
    if (!block.InMemory(plane)) events_.OnMovedToDisk(record);
  } else {
    disk_bytes_[p] -= record_bytes;
    --disk_records_[p];
    domains_[block.domain].disk -= record_bytes;
    digest_disk_bytes_ -= digest_bytes;
    domains_[block.domain].digest_disk -= digest_bytes;
    if (!block.InMemory(plane)) events_.OnWithdrawn(record);
  }
}

uint64_t BlockTable::AllocateLanding(uint32_t number) {
  const std::optional<uint64_t> record = allocator_.TryAllocate(At(number).cls);
  KVT_CHECK(record.has_value(), "no record left in class ", At(number).cls);
  landing_bytes_ += allocator_.RecordBytes(At(number).cls);
  return *record;
}

void BlockTable::FreeLanding(uint32_t number, uint64_t offset) {
  landing_bytes_ -= allocator_.RecordBytes(At(number).cls);
  allocator_.Free(offset);
}

void BlockTable::InstallLanding(uint32_t number, Plane plane, uint64_t offset) {
  Block& block = At(number);
  KVT_CHECK(block.state == BlockState::kSealed && !block.InMemory(plane), "block ", number);
  landing_bytes_ -= allocator_.RecordBytes(block.cls);
  Account(block, -1);
  block.offset[static_cast<size_t>(plane)] = offset;
  Account(block, 1);
  events_.OnSealed(PlaneRecordHandle(HandleOf(number), plane), offset);
}

Block* BlockTable::Find(uint32_t number, uint32_t generation) {
  if (number >= numbers_end_) return nullptr;
  Block& block = At(number);
  if (block.generation != generation || block.state == BlockState::kFree) return nullptr;
  return &block;
}

}  // namespace kvt
