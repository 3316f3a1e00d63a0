#include "prefill_worker/chunk_schedule.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt {

void ChunkSchedule::Add(uint64_t job, PrefillPlan* plan) {
  KVT_CHECK(plan != nullptr && !plan->AllTaken(), "job=", job);
  turns_.push_back({job, plan});
}

void ChunkSchedule::Remove(uint64_t job) {
  std::erase_if(turns_, [&](const Entry& entry) { return entry.job == job; });
}

std::vector<ChunkTurn> ChunkSchedule::TakeStep(int rows_max, int segments_max) {
  std::vector<ChunkTurn> step;
  std::deque<Entry> kept;
  std::deque<Entry> served;
  int rows = rows_max;
  while (!turns_.empty()) {
    const Entry entry = turns_.front();
    turns_.pop_front();
    std::optional<TokenRange> chunk;
    if (static_cast<int>(step.size()) < segments_max && rows > 0) {
      chunk = entry.plan->TakeChunk(rows);
    }
    if (!chunk.has_value()) {
      kept.push_back(entry);
      continue;
    }
    rows -= chunk->size();
    const bool last = entry.plan->AllTaken();
    step.push_back({entry.job, *chunk, last});
    if (!last) served.push_back(entry);
  }
  turns_ = std::move(kept);
  turns_.insert(turns_.end(), served.begin(), served.end());
  return step;
}

}  // namespace kvt
