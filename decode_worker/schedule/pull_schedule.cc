#include "decode_worker/schedule/pull_schedule.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt {

void PullSchedule::Add(uint64_t sequence, uint64_t bytes, absl::Time now) {
  // b - (t - arrival) * rate orders as b + arrival * rate at every t.
  const double arrival = absl::ToDoubleSeconds(now - absl::UnixEpoch());
  waiting_.push_back({sequence, static_cast<double>(bytes) + arrival * kAgeingBytesPerSecond});
}

void PullSchedule::Remove(uint64_t sequence) {
  std::erase_if(waiting_, [&](const Entry& entry) { return entry.sequence == sequence; });
}

std::optional<uint64_t> PullSchedule::Start() {
  if (waiting_.empty() || pulling_ >= pulls_max_) return std::nullopt;
  const auto first = std::min_element(
      waiting_.begin(), waiting_.end(),
      [](const Entry& a, const Entry& b) { return a.rank < b.rank; });
  const uint64_t sequence = first->sequence;
  waiting_.erase(first);
  ++pulling_;
  return sequence;
}

void PullSchedule::Finished() {
  KVT_CHECK(pulling_ > 0);
  --pulling_;
}

}  // namespace kvt
