// The blocks of one sequence on the device: its share of a SlotPool and its block table (DESIGN 1).
// PURE. All slots that the sequence may ever need are set aside at admission, so that a running
// sequence never waits for memory; a block that another sequence holds already is shared instead.
//
// Thread-safety: none; the engine thread's. Released explicitly, behind the last step that may read.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "kernels/model/slot_pool.h"

namespace kvt {

class SequenceSlots {
 public:
  // Sets aside room for `blocks` blocks; false, without a change, when the pool has none.
  [[nodiscard]] static std::optional<SequenceSlots> TryCreate(SlotPool& pool, int blocks);
  // Of a sequence that holds its slots otherwise: as if released.
  [[nodiscard]] static SequenceSlots None() { return SequenceSlots(); }
  SequenceSlots(SequenceSlots&& other) noexcept;
  SequenceSlots& operator=(SequenceSlots&& other) noexcept;  // over released ones
  ~SequenceSlots();  // released by then

  // The next block, in order: a new one of its own, or `block` with one more reference (what was set
  // aside for it goes back).
  PoolBlock AppendOwn();
  void AppendShared(PoolBlock block);
  // Gives back every block and what is still set aside. Blocks nobody else holds are reported
  // through `last`, for the index of shared blocks. Idempotent.
  void Release(uint64_t after_step, std::vector<PoolBlock>* last);

  [[nodiscard]] int blocks_max() const { return blocks_max_; }
  [[nodiscard]] absl::Span<const PoolBlock> blocks() const { return blocks_; }
  // pairs[layer * count + i] of blocks [first, first + count): what KvCache::SetTableAllLayers takes.
  [[nodiscard]] std::vector<SlotPair> Table(int first, int count) const;

 private:
  SequenceSlots() : pool_(nullptr), blocks_max_(0) {}
  SequenceSlots(SlotPool& pool, int blocks_max) : pool_(&pool), blocks_max_(blocks_max) {}

  SlotPool* pool_;  // null: released
  int blocks_max_;
  std::vector<PoolBlock> blocks_;
};

// Slots that `blocks` TARGET blocks take.
[[nodiscard]] uint64_t SlotsFor(const SlotPool& pool, int blocks);
// Blocks of a sequence that ends with `tokens` tokens: the KV of the last token is never written.
[[nodiscard]] int BlocksFor(uint64_t tokens);

}  // namespace kvt
