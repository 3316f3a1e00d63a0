// How much each layer loses when it alone attends sparsely: what the budgets of layers are divided by
// (kernels/select/layer_budgets.h). Attention weights do not tell: a layer's lost weight says nothing of
// what the layers behind it make of it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/model/text_run.h"
#include "kernels/select/calibration.h"

namespace kvt {

// [layer][kLossBlocks]: mean KL, in nats, of the next token after each of `tokens` (positions first ..,
// at most kSparseRowsMax) from full attention's; empty for a dense layer. The KV of the run, which
// holds that text to the end of `tokens`, is as before when this returns. Waits for the device; errors
// as TextRun's.
[[nodiscard]] absl::StatusOr<std::vector<std::vector<double>>> MeasureLayerLosses(
    TextRun& run, const Calibration& calibration, absl::Span<const int32_t> tokens, int first);

}  // namespace kvt
