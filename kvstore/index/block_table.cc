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
  add(counts_[state], 1);
  for (size_t plane = 0; plane < kPlanes; ++plane) {
    if (block.offset[plane] == kNoOffset) continue;
    add(bytes_[state], record_bytes);
    if (block.state == BlockState::kSealed) add(sealed_bytes_[plane], record_bytes);
  }
}

uint32_t BlockTable::Allocate(RecordAllocator::ClassId cls) {
  uint32_t number;
  if (!free_.empty()) {
    number = free_.back();
    free_.pop_back();
  } else {
    KVT_CHECK(blocks_.size() < blocks_max_, "block numbers ", blocks_max_);
    number = static_cast<uint32_t>(blocks_.size());
    blocks_.emplace_back();
  }
  Block& block = blocks_[number];
  KVT_CHECK(block.state == BlockState::kFree);
  block.cls = cls;
  for (uint64_t& offset : block.offset) {
    const std::optional<uint64_t> record = allocator_.TryAllocate(cls);
    KVT_CHECK(record.has_value(), "no record left in class ", cls);
    offset = *record;
  }
  block.state = BlockState::kReserved;
  Account(block, 1);
  return number;
}

void BlockTable::SetState(uint32_t number, BlockState state) {
  Block& block = blocks_[number];
  KVT_CHECK(block.state != BlockState::kFree && state != BlockState::kFree);
  const bool was_sealed = block.state == BlockState::kSealed;
  Account(block, -1);
  block.state = state;
  Account(block, 1);
  const bool is_sealed = state == BlockState::kSealed;
  if (was_sealed == is_sealed) return;
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    if (!block.HasPlane(plane)) continue;
    const uint64_t record = PlaneRecordHandle(HandleOf(number), plane);
    if (is_sealed) {
      events_.OnSealed(record, block.offset[static_cast<size_t>(plane)]);
    } else {
      events_.OnWithdrawn(record);
    }
  }
}

void BlockTable::Free(uint32_t number) {
  Block& block = blocks_[number];
  KVT_CHECK(block.state != BlockState::kFree && block.pins == 0 && !block.IsInFlight() &&
                !block.indexed && !block.in_order,
            "block ", number, " is in use");
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

void BlockTable::DropResidual(uint32_t number) {
  Block& block = blocks_[number];
  constexpr auto kIndex = static_cast<size_t>(Plane::kResidual);
  KVT_CHECK(block.state == BlockState::kSealed && block.HasPlane(Plane::kResidual) &&
            block.in_flight[kIndex] == 0);
  events_.OnWithdrawn(PlaneRecordHandle(HandleOf(number), Plane::kResidual));
  Account(block, -1);
  allocator_.Free(std::exchange(block.offset[kIndex], kNoOffset));
  Account(block, 1);
}

Block* BlockTable::Find(uint32_t number, uint32_t generation) {
  if (number >= blocks_.size()) return nullptr;
  Block& block = blocks_[number];
  if (block.generation != generation || block.state == BlockState::kFree) return nullptr;
  return &block;
}

}  // namespace kvt
