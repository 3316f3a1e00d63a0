// Selection by digests over the sequence of a TextRun: digests of every layer's selecting heads, the
// scores of middle blocks, and the best of them. What a decode worker does on its device, for
// calibration and measurements.
// Owner: as TextRun, which outlives it. Not thread-safe; waits for the device.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/model/digest_heads.h"
#include "kernels/model/text_run.h"
#include "kernels/select/calibration.h"
#include "kernels/selection.h"

namespace kvt {

class DigestSelector {
 public:
  // layers[l]: the selecting heads of a layer; none: it is dense.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<DigestSelector>> Create(
      TextRun& run, int bits, std::vector<std::vector<CalibrationHead>> layers);

  // Digests of blocks [first, end) of a layer, whose keys have been written.
  [[nodiscard]] absl::Status MakeDigests(int layer, int first, int end);

  // Rows at these positions, row r's queries at q + r * q_stride (as LayerActivations::qkv), at most
  // kSparseRowsMax. Result: scores of the blocks of each row's middle, [row][row's middle count].
  [[nodiscard]] absl::StatusOr<std::vector<absl::Span<const float>>> Score(
      int layer, absl::Span<const int> positions, const float* q, int q_stride);
  // The blocks of each row that fit the budget beside sinks and recent tokens, ascending.
  [[nodiscard]] absl::StatusOr<std::vector<std::vector<int32_t>>> Select(
      int layer, absl::Span<const int> positions, const float* q, int q_stride, int budget_tokens);

  [[nodiscard]] bool dense(int layer) const { return heads_->dense(layer); }

 private:
  explicit DigestSelector(TextRun& run) : run_(run) {}
  // The scores are there when what is enqueued has run.
  [[nodiscard]] std::vector<absl::Span<const float>> EnqueueScore(int layer,
                                                                  absl::Span<const int> positions,
                                                                  const float* q, int q_stride);

  TextRun& run_;
  int blocks_ = 0;
  std::unique_ptr<DigestHeads> heads_;
  std::vector<DeviceBuffer> digests_;  // by layer
  DeviceBuffer scores_;                // [kSparseRowsMax][blocks]
  DeviceBuffer selected_;              // the same
  DeviceBuffer workspace_;
  std::vector<ScoreSegment> score_segments_;
  std::vector<SelectSegment> select_segments_;
};

}  // namespace kvt
