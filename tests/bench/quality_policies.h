// Ways to choose the blocks of a row, side by side, for quality_bench. Not thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/model/digest_selector.h"
#include "kernels/model/text_run.h"
#include "kernels/select/calibration.h"

namespace kvt {

// Chooses for the rows of one run. Made for a prefix that has been computed.
class Policy {
 public:
  virtual ~Policy() = default;
  // The keys of blocks [first, end) have been written (again).
  virtual void Refresh(int first, int end) = 0;
  virtual RowSelections Select(int layer, int first_position, const LayerActivations& activations,
                               int budget) = 0;
};

struct PolicyKind {
  enum class Way {
    kFull, kWindow, kDigests, kEqual, kResident, kOracle, kHeadwise, kOneHead, kCentres, kBounds
  };
  std::string name;  // of rows; "full" has none
  Way way = Way::kFull;
  // kDigests, kEqual, kResident: its sets; kHeadwise, kOneHead: one with every head.
  const Calibration* calibration = nullptr;
  std::vector<int> heads;                    // kOneHead, kCentres, kBounds: the head of each layer
};

std::unique_ptr<Policy> MakePolicy(const PolicyKind& kind, TextRun& run);

}  // namespace kvt
