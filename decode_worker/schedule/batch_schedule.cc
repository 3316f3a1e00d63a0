#include "decode_worker/schedule/batch_schedule.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt {

void BatchSchedule::Add(uint64_t sequence) {
  KVT_CHECK(std::find(running_.begin(), running_.end(), sequence) == running_.end(),
            "sequence=", sequence);
  running_.push_back(sequence);
}

void BatchSchedule::Remove(uint64_t sequence) { std::erase(running_, sequence); }

std::vector<uint64_t> BatchSchedule::TakeBatch(int rows_max) {
  const size_t count = std::min(running_.size(), static_cast<size_t>(rows_max));
  std::vector<uint64_t> batch(running_.begin(), running_.begin() + static_cast<int64_t>(count));
  running_.erase(running_.begin(), running_.begin() + static_cast<int64_t>(count));
  running_.insert(running_.end(), batch.begin(), batch.end());
  return batch;
}

}  // namespace kvt
