// Which selected blocks of a layer stay on the device (DESIGN 5). Slots hold blocks; a step's
// selection hits or misses. A block's worth is its selections while it is there, each fading by a tenth
// a step (LRFU: Lee et al., IEEE Trans. Computers 50(12), 2001): what is seen once does not push out
// what comes again. Measured on recorded selections it misses less than LRU (docs/QUALITY.md). Also
// Belady's optimum over a recorded trace, and the division of slots among layers by their miss curves.
// Pure.
// Owner: the decode engine, one per sequence and layer. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvt {

class HotSet {
 public:
  // capacity >= the largest selection that will be used. `probe` slots more or fewer are measured
  // along: Gain and Loss.
  explicit HotSet(int capacity, int probe = 0) : capacity_(capacity), probe_(probe) {}

  struct Change {
    std::vector<int32_t> misses;   // to fetch, ascending as in the selection
    std::vector<int32_t> evicted;  // whose slots are free now
  };
  // The step selects `blocks` (distinct). Nothing selected is evicted.
  Change Use(absl::Span<const int32_t> blocks);
  // A block that could not be fetched, or is not wanted any more. Not there: nothing.
  void Remove(int32_t block);
  // More slots, or fewer: then returns what was evicted.
  std::vector<int32_t> SetCapacity(int capacity);

  // Since ResetProbe: misses of blocks that `probe` more slots would still hold, and hits of those
  // that as many fewer would not.
  [[nodiscard]] int Gain() const { return gain_; }
  [[nodiscard]] int Loss() const { return loss_; }
  void ResetProbe() { gain_ = loss_ = 0; }

  [[nodiscard]] int capacity() const { return capacity_; }
  [[nodiscard]] int size() const { return static_cast<int>(order_.size()); }
  [[nodiscard]] bool Contains(int32_t block) const;
  // What it holds.
  [[nodiscard]] std::vector<int32_t> Blocks() const;

 private:
  int capacity_;
  int probe_;
  int gain_ = 0;
  int loss_ = 0;
  struct Held {
    int32_t block;
    float worth;
  };
  // The last step's selection, then the rest; each by falling worth. The last goes first.
  std::vector<Held> order_;
  size_t selected_ = 0;  // of the last step
  std::vector<int32_t> ghosts_;  // evicted, the latest first; at most probe_
};

// Selections of one layer, step by step.
using SelectionTrace = std::vector<std::vector<int32_t>>;

// Misses of each step after the first, which fills the empty set.
[[nodiscard]] std::vector<int> HotSetMisses(const SelectionTrace& trace, int capacity);
// The same for the policy that knows the future: what is needed again latest, or never, goes first.
[[nodiscard]] std::vector<int> BeladyMisses(const SelectionTrace& trace, int capacity);

// Misses per step of a layer at capacities least + i * step.
struct MissCurve {
  int least = 0;
  int step = 1;                // > 0
  std::vector<double> misses;  // falling; not empty
};
// Slots of each layer, in sum at most `total` and as near as steps allow; each layer gets its `least`
// and then, again and again, the layer with the steepest fall of misses per slot (over as many steps as
// make it steepest) gets those steps. Requires total >= the sum of `least`.
[[nodiscard]] std::vector<int> DivideSlots(const std::vector<MissCurve>& curves, int total);

}  // namespace kvt
