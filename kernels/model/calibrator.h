// Calibration of a model over long texts (DESIGN 5): what each head attends to, which heads shall
// select in each layer, and the scales of their digests. Deterministic: the same texts, options and
// numerics id give the same file to the byte.
// Owner: kvtide-calibrate or a test. Not thread-safe. Keeps the KV of every text until Finish.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/model/text_run.h"
#include "kernels/select/attention_stats.h"
#include "kernels/select/calibration.h"
#include "kernels/select/selecting_set.h"

namespace kvt {

struct CalibratorOptions {
  std::vector<int> lengths = {2048, 4096, 8000};  // of contexts, ascending, each >= 1,024
  int queries = 64;      // of each length, spread over its last 512 positions; divides 512
  int budget = 512;      // tokens, for captured attention
  int loss_rows = 64;    // at the end of the middle length, for the layers' losses; 0: not measured
  int trace_budget = 1024;  // tokens, for miss curves over the last 128 positions
  SelectingSetOptions set;
};

// Captured attention of a layer when blocks are chosen by ...
struct CapturedBy {
  Captured headwise;    // every KV head for itself
  Captured set;         // the chosen set
  Captured all;         // all heads averaged
  Captured mam;         // the head of most middle attention
  Captured reversed;    // the head of least excess
};

struct LayerReport {
  LayerMeasure measure;  // means over texts and lengths
  LayerChoice choice;
  CapturedBy captured;
  std::vector<int> best_by_text;
  std::vector<int> mam_by_text;
};

struct CalibrationReport {
  Calibration calibration;
  Calibration every_head;  // the same with every KV head of every layer: for comparisons
  std::vector<LayerReport> layers;
};

class Calibrator {
 public:
  // InvalidArgument naming the option. `transformer` outlives it.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Calibrator>> Create(
      const Transformer& transformer, std::string fingerprint, CalibratorOptions options);
  ~Calibrator();

  // InvalidArgument when it has fewer tokens than the shortest length; of a longer one the first.
  [[nodiscard]] absl::Status AddText(absl::Span<const int32_t> tokens);
  // At least one text has been added. Errors as ChooseSelectingSets.
  [[nodiscard]] absl::StatusOr<CalibrationReport> Finish();

 private:
  struct Text;   // a run with the queries it was asked to keep
  struct Probe;  // the weights and scores of one text, length and layer

  Calibrator(const Transformer& transformer, std::string fingerprint, CalibratorOptions options);
  [[nodiscard]] CalibrationHead Channels(int layer, int kv_head) const;
  absl::Status MeasureTexts();
  absl::Status MeasureText(size_t text);
  absl::Status MeasureLayer(size_t text, int layer);
  [[nodiscard]] Captured CapturedWith(int layer, const std::vector<int>& heads) const;
  [[nodiscard]] Captured CapturedHeadwise(int layer) const;
  // Needs the selecting sets; changes no KV.
  absl::Status Losses(Calibration* calibration);
  // Needs the losses: budgets of layers.
  absl::Status MissCurves(Calibration* calibration);
  [[nodiscard]] Calibration WithEveryHead(Calibration calibration) const;

  const Transformer& transformer_;
  const std::string fingerprint_;
  const CalibratorOptions options_;
  std::vector<std::unique_ptr<Text>> texts_;
  std::vector<std::vector<CalibrationHead>> channels_;   // [layer][KV head]
  std::vector<std::vector<std::unique_ptr<Probe>>> probes_;  // [layer][text and length]
};

}  // namespace kvt
