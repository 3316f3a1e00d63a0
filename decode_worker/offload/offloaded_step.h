// Runs decode steps of the offloaded class on the device (DESIGN 5), policy `sync-recall`: in every
// layer that is not dense the rows' blocks are scored by their digests and the best chosen; the engine
// thread decides what has to be fetched, for the whole batch at once; when it is there, the rows attend
// to sinks, selected and recent blocks. Nothing is overlapped with the fetches.
//
//   Enqueue -> [score -> device callback -> plan -> fetch] per layer -> ... -> step_done
//
// A fetch that fails leaves its block out of that row; the row's result says so, and its sequence must
// compute the step again. One step in flight. Owned and called by the engine thread; hooks run there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "decode_worker/offload/digest_buffer.h"
#include "decode_worker/offload/offloaded_slots.h"
#include "kernels/device.h"
#include "kernels/model/digest_heads.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"
#include "kvstore/client/task_queue.h"

namespace kvt {

// Everything pointed to stays until the step is done.
struct OffloadedRow {
  OffloadedSlots* slots = nullptr;  // the position's block is there, whole
  const DigestBuffer* digests = nullptr;  // of every block of the position's middle
  int table_row = 0;                      // of the KvCache; SetBlock was called for what is there
  int position = 0;
  int32_t token = 0;
  SampleParams sample;
};

struct OffloadedRowResult {
  int32_t token = 0;  // kTokenInvalid: NaN
  bool exact = true;  // every layer read everything
  // Over the layers that are not dense.
  int selected = 0;  // blocks asked for, hits and misses
  int misses = 0;    // fetched
  int left_out = 0;  // beyond the fetch cap
  int lost = 0;      // fetches that failed
};

struct OffloadedStepResult {
  uint64_t step = 0;
  std::vector<OffloadedRowResult> rows;
  uint64_t saturated = 0;
};

struct OffloadedFetch {
  int row = 0;  // of the step
  BlockFetch fetch;
};

class OffloadedStep {
 public:
  struct Hooks {
    // Brings blocks of one layer into their slots and calls `done` later, on the engine thread, with
    // what succeeded. `fetches` stays valid until then.
    std::function<void(int layer, absl::Span<const OffloadedFetch> fetches,
                       std::function<void(const std::vector<bool>&)> done)>
        fetch;
    std::function<void(const OffloadedStepResult&)> step_done;
  };

  // Everything borrowed outlives the step. `stream` is shared with the steps of resident sequences: a
  // row of the tables passes from one class to the other in its order.
  static absl::StatusOr<std::unique_ptr<OffloadedStep>> Create(const Transformer& transformer,
                                                               KvCache& cache,
                                                               const DigestHeads& heads,
                                                               const OffloadBudget& budget,
                                                               Stream& stream, TaskQueue& queue,
                                                               int rows, Hooks hooks);
  // The block's slots, in the layers that have them, into the tables of a row. Between steps.
  void SetBlock(int table_row, const OffloadedSlots& slots, int block);
  // Makes digests of these blocks in a layer, from slots that hold them. In order with the steps.
  void MakeDigests(const DigestBuffer& digests, int layer, absl::Span<const SlotPair> pairs,
                   absl::Span<const uint32_t> blocks);
  // Calls `then` on the engine thread when everything enqueued so far has run.
  void Then(std::function<void()> then);

  // Requires !busy().
  void Enqueue(uint64_t step, absl::Span<const OffloadedRow> rows);
  [[nodiscard]] bool busy() const { return busy_; }

 private:
  struct LayerWork {  // of the step in flight; borrowed by device operations
    std::vector<std::vector<SlotPair>> tables;  // by row
    std::vector<AttentionSegment> attention;
    std::vector<ScoreSegment> score;
    std::vector<SelectSegment> select;
  };

  OffloadedStep(const Transformer& transformer, KvCache& cache, const DigestHeads& heads,
                const OffloadBudget& budget, Stream& stream, TaskQueue& queue, Hooks hooks)
      : transformer_(transformer), cache_(cache), heads_(heads), budget_(budget), stream_(&stream),
        queue_(queue), hooks_(std::move(hooks)) {}
  absl::Status Allocate(int rows);
  void RunFrom(int layer);
  // True when a device callback or a fetch goes on later.
  bool Score(int layer);
  bool Plan(int layer);
  void OnFetched(int layer, const std::vector<bool>& ok);
  void Attend(int layer);
  void Done();
  [[nodiscard]] static int SelectedCount(const OffloadedRow& row, int layer);

  const Transformer& transformer_;
  KvCache& cache_;
  const DigestHeads& heads_;
  const OffloadBudget budget_;
  Stream* const stream_;
  TaskQueue& queue_;
  const Hooks hooks_;
  size_t blocks_ = 0;  // of a row's table
  std::unique_ptr<StepState> state_;
  std::unique_ptr<Mailbox> mailbox_;
  DeviceBuffer tables_;     // [rows][blocks_] of SlotPair
  DeviceBuffer scores_;     // [rows][blocks_]
  DeviceBuffer selected_;   // [rows][blocks_]
  DeviceBuffer workspace_;
  DeviceBuffer digest_work_;  // pairs and entries of one MakeDigests
  std::vector<float> host_scores_;       // [rows][blocks_]
  std::vector<int32_t> host_selected_;   // the same

  // Of the step in flight.
  bool busy_ = false;
  uint64_t step_ = 0;
  std::vector<OffloadedRow> rows_;
  std::vector<OffloadedRowResult> results_;
  std::vector<LayerWork> layers_;
  std::vector<std::vector<int32_t>> chosen_;  // by row, of the layer in work
  std::vector<OffloadedFetch> fetches_;
};

}  // namespace kvt
