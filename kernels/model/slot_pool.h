// Which slot of a KvCache belongs to whom (DESIGN 1, 5): blocks with a pair of slots per layer,
// reference counts, admission, and freeing behind the work that may still read. PURE: no memory, no
// device, no clock. Used by the prefill and the decode worker.
//
// Invariants, checked:
// 1. free + retiring + held == total, in slots; reserved <= free.
// 2. A slot is free only after every step up to the one named at its release has retired: a step is
//    a number that the engine raises for each batch it enqueues and retires in order.
// 3. A block has its base slots always, and its residual slots while it is TARGET.
//
// Sequences of the offloaded class hold other blocks in every layer: they take loose pairs, the two
// slots of one block in one layer, and keep them themselves.
//
// Thread-safety: none; owned by one engine thread.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/types/span.h"
#include "kernels/base/ids.h"
#include "kernels/paged_kv.h"

namespace kvt {

// A block's executable state: both planes on the device, or the BASE plane alone.
enum class PoolBlockState : uint8_t { kTarget = 0, kBase = 1 };

// A block held by a pool. Reused after its slots are free.
using PoolBlock = StrongId<struct PoolBlockTag, uint32_t>;

class SlotPool {
 public:
  SlotPool(int layers, uint32_t slot_count);
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // Slots of one block in that state: `layers` for each plane.
  [[nodiscard]] uint32_t SlotsPerBlock(PoolBlockState state) const;

  // Sets slots aside for later Allocate calls, or changes nothing and returns false when fewer are
  // free and not set aside.
  [[nodiscard]] bool TryReserve(uint64_t slots);
  void Unreserve(uint64_t slots);
  // Takes the slots of a block from what was set aside (KVT_CHECKed). It has one reference.
  [[nodiscard]] PoolBlock Allocate(PoolBlockState state);

  // A second owner of the same content.
  void AddReference(PoolBlock block);
  // Drops one reference. The last one frees the block's slots once `after_step` has retired (0: at
  // once: no step reads them).
  void Release(PoolBlock block, uint64_t after_step);
  // Frees the residual slots of a TARGET block once `after_step` has retired. Moves no bytes.
  void Demote(PoolBlock block, uint64_t after_step);
  // Gives a BASE block residual slots from what was set aside.
  void Restore(PoolBlock block);

  // Two slots that belong to no block, from what was set aside (KVT_CHECKed).
  [[nodiscard]] SlotPair AllocatePair();
  // Frees them once `after_step` has retired.
  void ReleasePair(SlotPair pair, uint64_t after_step);

  // Every step up to and including `step` has ended.
  void Retire(uint64_t step);

  // The block's slots, one pair a layer. Valid until the block changes.
  [[nodiscard]] absl::Span<const SlotPair> Pairs(PoolBlock block) const;
  [[nodiscard]] PoolBlockState State(PoolBlock block) const;
  [[nodiscard]] uint32_t References(PoolBlock block) const;

  [[nodiscard]] uint32_t total() const { return total_; }
  [[nodiscard]] uint32_t free() const { return static_cast<uint32_t>(free_.size()); }
  [[nodiscard]] uint32_t reserved() const { return reserved_; }
  // Released, but a step may still read them.
  [[nodiscard]] uint32_t retiring() const { return retiring_; }
  // What TryReserve can still give.
  [[nodiscard]] uint32_t available() const { return free() - reserved_; }
  [[nodiscard]] uint32_t blocks() const { return live_blocks_; }

 private:
  struct Block {
    std::vector<SlotPair> pairs;
    uint32_t references = 0;
    PoolBlockState state = PoolBlockState::kTarget;
  };
  struct Retiring {
    uint64_t after_step;
    uint32_t slot;
  };

  [[nodiscard]] const Block& Get(PoolBlock block) const;
  [[nodiscard]] Block& Get(PoolBlock block);
  uint32_t TakeSlot();
  void FreeSlot(uint32_t slot, uint64_t after_step);

  const int layers_;
  const uint32_t total_;
  uint32_t reserved_ = 0;
  uint32_t retiring_ = 0;
  uint32_t live_blocks_ = 0;
  uint64_t retired_step_ = 0;
  std::vector<uint32_t> free_;  // a stack: the slot used last is the warmest
  std::deque<Retiring> retiring_slots_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> free_blocks_;
};

}  // namespace kvt
