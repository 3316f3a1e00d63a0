#include "decode_worker/pool/sequence_slots.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/limits.h"
#include "kernels/base/units.h"

namespace kvt {

uint64_t SlotsFor(const SlotPool& pool, int blocks) {
  return static_cast<uint64_t>(blocks) * pool.SlotsPerBlock(PoolBlockState::kTarget);
}

int BlocksFor(uint64_t tokens) {
  KVT_CHECK(tokens > 0);
  return static_cast<int>(CeilDiv(std::max<uint64_t>(tokens - 1, 1), kBlockTokens));
}

std::optional<SequenceSlots> SequenceSlots::TryCreate(SlotPool& pool, int blocks) {
  KVT_CHECK(blocks > 0, "blocks=", blocks);
  if (!pool.TryReserve(SlotsFor(pool, blocks))) return std::nullopt;
  return SequenceSlots(pool, blocks);
}

SequenceSlots::SequenceSlots(SequenceSlots&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      blocks_max_(other.blocks_max_),
      blocks_(std::move(other.blocks_)) {}

SequenceSlots& SequenceSlots::operator=(SequenceSlots&& other) noexcept {
  KVT_CHECK(pool_ == nullptr, "blocks=", blocks_.size());
  pool_ = std::exchange(other.pool_, nullptr);
  blocks_max_ = other.blocks_max_;
  blocks_ = std::move(other.blocks_);
  return *this;
}

SequenceSlots::~SequenceSlots() { KVT_CHECK(pool_ == nullptr, "blocks=", blocks_.size()); }

PoolBlock SequenceSlots::AppendOwn() {
  KVT_CHECK(static_cast<int>(blocks_.size()) < blocks_max_);
  blocks_.push_back(pool_->Allocate(PoolBlockState::kTarget));
  return blocks_.back();
}

void SequenceSlots::AppendShared(PoolBlock block) {
  KVT_CHECK(static_cast<int>(blocks_.size()) < blocks_max_);
  pool_->AddReference(block);
  pool_->Unreserve(pool_->SlotsPerBlock(PoolBlockState::kTarget));
  blocks_.push_back(block);
}

void SequenceSlots::Release(uint64_t after_step, std::vector<PoolBlock>* last) {
  if (pool_ == nullptr) return;
  for (const PoolBlock block : blocks_) {
    if (pool_->References(block) == 1 && last != nullptr) last->push_back(block);
    pool_->Release(block, after_step);
  }
  pool_->Unreserve(SlotsFor(*pool_, blocks_max_ - static_cast<int>(blocks_.size())));
  blocks_.clear();
  pool_ = nullptr;
}

std::vector<SlotPair> SequenceSlots::Table(int first, int count) const {
  std::vector<SlotPair> table;
  for (int i = 0; i < count; ++i) {
    const absl::Span<const SlotPair> pairs = pool_->Pairs(blocks_[static_cast<size_t>(first + i)]);
    table.resize(pairs.size() * static_cast<size_t>(count));
    for (size_t layer = 0; layer < pairs.size(); ++layer) {
      table[layer * static_cast<size_t>(count) + static_cast<size_t>(i)] = pairs[layer];
    }
  }
  return table;
}

}  // namespace kvt
