// Whose chunks make up the next step: jobs take turns, so that one long prompt does not block all.
// PURE.
//
// The job whose turn it is gets as much of the step as its next chunk needs; what is left goes to
// the jobs behind it, so short prompts share a step. Every job that got rows goes to the back.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "prefill_worker/prefill_plan.h"

namespace kvt {

struct ChunkTurn {
  uint64_t job = 0;
  TokenRange range;
  bool last = false;  // of the job: its last row gets logits
};

class ChunkSchedule {
 public:
  // `plan` (borrowed until Remove) has tokens left. The job goes to the back.
  void Add(uint64_t job, PrefillPlan* plan);
  // A job that was cancelled or failed. Unknown: nothing.
  void Remove(uint64_t job);
  // Takes chunks for one step of at most `rows_max` tokens and `segments_max` chunks. A job whose
  // last chunk was taken leaves the schedule.
  [[nodiscard]] std::vector<ChunkTurn> TakeStep(int rows_max, int segments_max);
  [[nodiscard]] bool empty() const { return turns_.empty(); }
  [[nodiscard]] size_t size() const { return turns_.size(); }

 private:
  struct Entry {
    uint64_t job;
    PrefillPlan* plan;
  };
  std::deque<Entry> turns_;
};

}  // namespace kvt
