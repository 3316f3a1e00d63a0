// How the tokens of a sparse step are divided among the layers (DESIGN 5). Equal parts spend on layers
// that hardly need them what a few others lack: measured with one layer sparse at a time, the KL of the
// next token at 256 selected tokens differs thirtyfold between layers. The calibration holds that
// loss for a few sizes of the selection (CalibrationLayer::losses); the budgets minimise its sum, as
// if losses of layers added up (they nearly do: docs/decisions/0008). Pure; thread-safe.
#pragma once

#include <vector>

#include "kernels/select/calibration.h"

namespace kvt {

// Tokens that each layer attends to, sinks and recent ones included (SelectedBlocks), so that the
// layers that are not dense have `budget_tokens` in the mean; 0 for a dense layer. `middle_blocks`: the
// most that there will be to select from. Every layer has `budget_tokens` where the calibration has no
// losses, and where the budget covers the middle.
[[nodiscard]] std::vector<int> LayerBudgets(const Calibration& calibration, int budget_tokens,
                                            int middle_blocks);

// Blocks that a step of this budget selects in a layer: what SelectedBlocks gives at most.
[[nodiscard]] int BudgetBlocks(int budget_tokens);

}  // namespace kvt
