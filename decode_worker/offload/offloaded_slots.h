// The part of an offloaded sequence that is on the device (DESIGN 5): its share of a SlotPool, layer by
// layer. PURE.
//
//   whole blocks    slots in every layer: sinks, recent blocks, completed ones that the tier lacks yet
//   dense layers    slots for every block
//   hot slots       of each other layer, for middle blocks that steps select (HotSet)
//
// Invariants:
// 1. All that the shape asks for is set aside at creation; only more whole blocks than that need more.
// 2. A block is whole or, in a layer that is not dense, hot, or not there; never both.
// 3. Pairs of a block are free only behind the step that may still read them.
//
// Thread-safety: none; the engine thread's. Released explicitly.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "decode_worker/offload/offload_shape.h"
#include "kernels/model/slot_pool.h"
#include "kernels/select/attention_stats.h"
#include "kernels/select/hot_set.h"

namespace kvt {

// A middle block that goes into a hot slot.
struct BlockFetch {
  int32_t block = 0;
  SlotPair pair;
};

// What a step reads of the middle in one layer.
struct LayerSelection {
  std::vector<int32_t> blocks;     // ascending; the fetches among them
  std::vector<BlockFetch> fetches;  // not there yet
  int left_out = 0;                // selected, but beyond the fetch cap
};

// Steps from one look at the division of hot slots to the next.
inline constexpr int kBalanceSteps = 6;

class OffloadedSlots {
 public:
  // nullopt, without a change, when the pool has no room.
  [[nodiscard]] static std::optional<OffloadedSlots> TryCreate(SlotPool& pool, OffloadedShape shape);
  OffloadedSlots(OffloadedSlots&& other) noexcept;
  OffloadedSlots& operator=(OffloadedSlots&&) = delete;
  ~OffloadedSlots();  // released by then

  // The next block in order, whole; between the sequence's steps: it may get the slots of a block that
  // was let go. False, without a change: more whole blocks than the shape has,
  // and the pool has no room for another.
  [[nodiscard]] bool AppendWhole();
  // The next block in order, in dense layers only.
  void AppendStored();
  // The tier has the block: its slots go, but for dense layers.
  void LetGo(int block, uint64_t after_step);

  // Selected middle blocks of a layer, ascending, with their scores (empty: all alike). Misses beyond
  // `fetches_max` are left out, the lowest scores first. What is fetched counts as there from now on.
  [[nodiscard]] LayerSelection Select(int layer, absl::Span<const int32_t> blocks,
                                      absl::Span<const float> scores, int fetches_max);
  // Those blocks and every other one of [first, end) that is there, ascending.
  [[nodiscard]] std::vector<int32_t> WithResident(int layer, std::vector<int32_t> blocks, int first,
                                                  int end) const;
  // A step has ended. Now and then a few hot slots go from the layer that would miss them least to the
  // one that would gain most (HotSet's probe): their division follows the sequence.
  void EndStep();
  // A fetch that failed.
  void Forget(int layer, int32_t block);
  // Slots of the row's table at `position`: sinks, `selected`, recent blocks (Transformer::AttendOver).
  [[nodiscard]] std::vector<SlotPair> Table(int layer, int position,
                                            absl::Span<const int32_t> selected) const;

  [[nodiscard]] const OffloadedShape& shape() const { return shape_; }
  [[nodiscard]] int blocks() const { return static_cast<int>(whole_.size()); }
  [[nodiscard]] bool whole(int block) const { return whole_[static_cast<size_t>(block)]; }
  [[nodiscard]] int whole_blocks() const { return whole_count_; }
  // kSlotNone where the block is not there.
  [[nodiscard]] SlotPair Pair(int layer, int block) const;
  // All hot slots of a layer. Scratch while nothing has been selected.
  [[nodiscard]] absl::Span<const SlotPair> HotPairs(int layer) const {
    return layers_[static_cast<size_t>(layer)].all_hot;
  }
  // Slots held or set aside.
  [[nodiscard]] uint64_t slots() const;

  // Gives everything back, behind a step. Idempotent.
  void Release(uint64_t after_step);

 private:
  struct Layer {
    bool dense = false;
    std::vector<SlotPair> pairs;  // [block] of dense and whole ones
    std::vector<SlotPair> spare;  // of blocks that were let go: for the next whole ones
    HotSet hot{0};
    absl::flat_hash_map<int32_t, SlotPair> hot_pairs;
    std::vector<SlotPair> free_hot;
    std::vector<SlotPair> all_hot;
  };
  OffloadedSlots(SlotPool& pool, OffloadedShape shape);
  [[nodiscard]] uint64_t Selecting() const;  // layers that are not dense
  void MoveHotSlots(Layer& from, Layer& to, int count);

  SlotPool* pool_;  // null: released
  OffloadedShape shape_;
  std::vector<Layer> layers_;
  std::vector<bool> whole_;
  int whole_count_ = 0;
  int steps_ = 0;  // since hot slots were divided anew
};

}  // namespace kvt
