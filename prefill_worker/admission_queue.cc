#include "prefill_worker/admission_queue.h"

#include <algorithm>

namespace kvt {

bool AdmissionQueue::TryPush(uint64_t job, uint64_t slots, absl::Time now) {
  if (waiting_.size() >= jobs_max_) return false;
  waiting_.push_back({job, slots, now, now});
  return true;
}

void AdmissionQueue::Return(uint64_t job, uint64_t slots, absl::Time since,
                            absl::Time not_before) {
  const auto at = std::find_if(waiting_.begin(), waiting_.end(),
                               [&](const Entry& entry) { return entry.since > since; });
  waiting_.insert(at, {job, slots, since, not_before});
}

void AdmissionQueue::Remove(uint64_t job) {
  std::erase_if(waiting_, [&](const Entry& entry) { return entry.job == job; });
}

std::optional<uint64_t> AdmissionQueue::Pop(uint64_t slots_free, absl::Time now) {
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if (it->not_before > now) continue;
    if (it->slots <= slots_free) {
      const uint64_t job = it->job;
      waiting_.erase(it);
      return job;
    }
    if (now - it->since >= ageing_bound_) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace kvt
