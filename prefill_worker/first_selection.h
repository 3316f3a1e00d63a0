// What the last step of an offloaded request's prefill adds (DESIGN 5): in every layer that selects,
// the digests of all full blocks of the sequence, and the blocks of the middle that its last token
// chooses. They follow the layer's ProjectQkv on the step's stream and end in host memory.
//
// FirstSelector: owned by the composition root, used by the pipeline's owner (one thread). One step at
// a time; Reset() once the device has run the last one.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/model/digest_heads.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"
#include "kernels/ops.h"
#include "kernels/select/attention_stats.h"

namespace kvt {

// Of one sequence. Written by the device until its step is done.
struct FirstSelection {
  int position = 0;  // of the last token
  int blocks = 0;    // full ones
  // digests[l]: of layer l, [blocks][digest bytes of the layer]; empty where it is dense.
  std::vector<std::vector<uint8_t>> digests;
  // By layer, ascending; indices into the sequence once Finish() has run.
  std::vector<std::vector<int32_t>> selected;

  // From indices into the middle, as the device writes them. Once.
  void Finish();
};

// A sequence of a step.
struct SelectionRow {
  int table_row = 0;
  int row = 0;  // of the step: the last token's
  FirstSelection* selection = nullptr;
};

class FirstSelector {
 public:
  // For sequences of at most `blocks_max` blocks; the budget counts sink and recent tokens, too.
  // `transformer` and `calibration` outlive it. ResourceExhausted.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<FirstSelector>> Create(
      const Transformer& transformer, const Calibration& calibration, int blocks_max,
      int budget_tokens);

  // Host memory for a sequence of so many tokens (> 0).
  [[nodiscard]] std::shared_ptr<FirstSelection> New(int tokens) const;

  // Between ProjectQkv and the next layer's. `rows` is read before the call returns; what it points
  // to stays valid until the step is done.
  void Enqueue(Stream& stream, const KvCache& cache, int layer, const LayerActivations& activations,
               absl::Span<const SelectionRow> rows);
  // The device has run everything enqueued.
  void Reset();

 private:
  FirstSelector(const Transformer& transformer, const Calibration& calibration, int blocks_max,
                int budget_tokens)
      : transformer_(transformer), calibration_(calibration), blocks_max_(blocks_max),
        budget_tokens_(budget_tokens) {}
  void Select(Stream& stream, int layer, const LayerActivations& activations,
              const SelectionRow& row);

  const Transformer& transformer_;
  const Calibration& calibration_;
  const int blocks_max_;
  const int budget_tokens_;
  std::unique_ptr<DigestHeads> heads_;
  DeviceBuffer digests_;   // of one layer and sequence
  DeviceBuffer scores_;    // f32 [blocks_max]
  DeviceBuffer selected_;  // i32 [blocks_max]
  DeviceBuffer workspace_;
  // Of the operations in progress.
  std::deque<ScoreSegment> score_segments_;
  std::deque<SelectSegment> select_segments_;
};

}  // namespace kvt
