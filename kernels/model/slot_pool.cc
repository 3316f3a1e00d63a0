#include "kernels/model/slot_pool.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt {

SlotPool::SlotPool(int layers, uint32_t slot_count) : layers_(layers), total_(slot_count) {
  KVT_CHECK(layers > 0, "layers=", layers);
  free_.reserve(slot_count);
  for (uint32_t slot = slot_count; slot > 0; --slot) free_.push_back(slot - 1);
}

uint32_t SlotPool::SlotsPerBlock(PoolBlockState state) const {
  const auto layers = static_cast<uint32_t>(layers_);
  return state == PoolBlockState::kTarget ? 2 * layers : layers;
}

bool SlotPool::TryReserve(uint64_t slots) {
  if (slots > available()) return false;
  reserved_ += static_cast<uint32_t>(slots);
  return true;
}

void SlotPool::Unreserve(uint64_t slots) {
  KVT_CHECK(slots <= reserved_, "slots=", slots, " reserved=", reserved_);
  reserved_ -= static_cast<uint32_t>(slots);
}

PoolBlock SlotPool::Allocate(PoolBlockState state) {
  KVT_CHECK(SlotsPerBlock(state) <= reserved_, "reserved=", reserved_);
  if (free_blocks_.empty()) {
    free_blocks_.push_back(static_cast<uint32_t>(blocks_.size()));
    blocks_.emplace_back();
  }
  const uint32_t index = free_blocks_.back();
  free_blocks_.pop_back();
  Block& block = blocks_[index];
  block.references = 1;
  block.state = state;
  block.pairs.resize(static_cast<size_t>(layers_));
  for (SlotPair& pair : block.pairs) {
    pair.base = TakeSlot();
    pair.residual = state == PoolBlockState::kTarget ? TakeSlot() : kSlotNone;
  }
  ++live_blocks_;
  return PoolBlock(index);
}

void SlotPool::AddReference(PoolBlock block) { ++Get(block).references; }

void SlotPool::Release(PoolBlock id, uint64_t after_step) {
  Block& block = Get(id);
  if (--block.references > 0) return;
  for (const SlotPair& pair : block.pairs) {
    FreeSlot(pair.base, after_step);
    if (pair.residual != kSlotNone) FreeSlot(pair.residual, after_step);
  }
  --live_blocks_;
  free_blocks_.push_back(id.value());
}

void SlotPool::Demote(PoolBlock id, uint64_t after_step) {
  Block& block = Get(id);
  KVT_CHECK(block.state == PoolBlockState::kTarget);
  for (SlotPair& pair : block.pairs) {
    FreeSlot(pair.residual, after_step);
    pair.residual = kSlotNone;
  }
  block.state = PoolBlockState::kBase;
}

void SlotPool::Restore(PoolBlock id) {
  Block& block = Get(id);
  KVT_CHECK(block.state == PoolBlockState::kBase);
  KVT_CHECK(static_cast<uint32_t>(layers_) <= reserved_, "reserved=", reserved_);
  for (SlotPair& pair : block.pairs) pair.residual = TakeSlot();
  block.state = PoolBlockState::kTarget;
}

SlotPair SlotPool::AllocatePair() {
  KVT_CHECK(reserved_ >= 2, "reserved=", reserved_);
  SlotPair pair;
  pair.base = TakeSlot();
  pair.residual = TakeSlot();
  return pair;
}

void SlotPool::ReleasePair(SlotPair pair, uint64_t after_step) {
  KVT_CHECK(pair.base < total_ && pair.residual < total_, "base=", pair.base);
  FreeSlot(pair.base, after_step);
  FreeSlot(pair.residual, after_step);
}

void SlotPool::Retire(uint64_t step) {
  KVT_CHECK(step >= retired_step_, "step=", step, " retired=", retired_step_);
  retired_step_ = step;
  // Releases name steps that never go back, but a release may name a later step than the next one's.
  size_t kept = 0;
  for (const Retiring& entry : retiring_slots_) {
    if (entry.after_step <= step) {
      free_.push_back(entry.slot);
    } else {
      retiring_slots_[kept++] = entry;
    }
  }
  retiring_slots_.resize(kept);
  retiring_ = static_cast<uint32_t>(kept);
}

absl::Span<const SlotPair> SlotPool::Pairs(PoolBlock block) const { return Get(block).pairs; }

PoolBlockState SlotPool::State(PoolBlock block) const { return Get(block).state; }

uint32_t SlotPool::References(PoolBlock block) const { return Get(block).references; }

const SlotPool::Block& SlotPool::Get(PoolBlock block) const {
  KVT_CHECK(block.value() < blocks_.size() && blocks_[block.value()].references > 0,
            "block=", block.value());
  return blocks_[block.value()];
}

SlotPool::Block& SlotPool::Get(PoolBlock block) {
  return const_cast<Block&>(static_cast<const SlotPool*>(this)->Get(block));
}

uint32_t SlotPool::TakeSlot() {
  KVT_CHECK(!free_.empty() && reserved_ > 0);
  const uint32_t slot = free_.back();
  free_.pop_back();
  --reserved_;
  return slot;
}

void SlotPool::FreeSlot(uint32_t slot, uint64_t after_step) {
  if (after_step <= retired_step_) {
    free_.push_back(slot);
    return;
  }
  retiring_slots_.push_back({after_step, slot});
  ++retiring_;
}

}  // namespace kvt
