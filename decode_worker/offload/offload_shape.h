// What a request of the offloaded class takes of the device (DESIGN 5): which layers are dense, how
// many hot slots each other layer has, how many blocks are held whole. Pure; plain values.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/select/calibration.h"

namespace kvt {

// How much of a sequence stays on the device and moves in a step. Of the worker's configuration.
struct OffloadBudget {
  int tokens = 2048;          // attended to in a step: sinks, recent and selected ones; of a layer, in
                              // the mean
  double hot_factor = 2;      // hot slots of all layers, in multiples of the selection
  double fetch_share = 0.05;  // of the sequence's blocks, most that a step fetches in a layer
  // Rows attend to every middle block that is on the device, not only to what the step selects: for
  // the same transfers and slots up to hot_factor times the tokens.
  bool attend_resident = false;
};

// Completed blocks that wait for their copy in the tier, beside sinks and recent ones.
inline constexpr int kOffloadedLagBlocks = 4;

struct OffloadedShape {
  std::vector<bool> dense;     // by layer
  std::vector<int> budgets;    // by layer: tokens attended to (LayerBudgets); 0 where dense
  std::vector<int> selected;   // by layer: most blocks that a step selects; 0 where dense
  std::vector<int> hot_slots;  // by layer, pairs, at least `selected`; 0 where dense
  int selected_mean = 0;       // blocks that a step selects in a layer, in the mean
  int middle_max = 0;          // middle blocks when it ends
  int blocks_max = 0;          // of the sequence when it ends
  int whole_max = 0;           // blocks held in every layer: sinks, recent ones, those not stored yet

  [[nodiscard]] int layers() const { return static_cast<int>(dense.size()); }
  [[nodiscard]] int dense_layers() const;
  // Slots of it all.
  [[nodiscard]] uint64_t Slots() const;
};

// For a sequence that ends with at most `blocks_max` blocks. The budget is divided among the layers by
// what each loses (LayerBudgets), hot slots by the calibration's miss curves; where it has none, each
// layer has the same multiple of its selection.
[[nodiscard]] OffloadedShape ShapeFor(const Calibration& calibration, const OffloadBudget& budget,
                                      int blocks_max);

// Most blocks of one layer that a step of a sequence of `blocks` blocks fetches; at least 1.
[[nodiscard]] int FetchesMax(const OffloadBudget& budget, int blocks);

}  // namespace kvt
