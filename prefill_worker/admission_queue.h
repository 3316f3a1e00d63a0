// Jobs that wait for device slots. PURE. First come, first served among those that fit; a job that
// does not fit is overtaken by smaller ones until it has waited for the ageing bound, from when on
// nobody behind it is admitted: nobody waits for ever. A job that the stores had no room for comes
// back with its age, and is passed over until its pause is over.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "absl/time/time.h"

namespace kvt {

class AdmissionQueue {
 public:
  AdmissionQueue(size_t jobs_max, absl::Duration ageing_bound)
      : jobs_max_(jobs_max), ageing_bound_(ageing_bound) {}

  // False when the queue is full.
  [[nodiscard]] bool TryPush(uint64_t job, uint64_t slots, absl::Time now);
  // A job that was popped comes back, to the place of its age; never refused.
  void Return(uint64_t job, uint64_t slots, absl::Time since, absl::Time not_before);
  void Remove(uint64_t job);
  // Removes and returns the next job to admit when `slots_free` slots are there.
  [[nodiscard]] std::optional<uint64_t> Pop(uint64_t slots_free, absl::Time now);
  [[nodiscard]] size_t size() const { return waiting_.size(); }

 private:
  struct Entry {
    uint64_t job;
    uint64_t slots;
    absl::Time since;
    absl::Time not_before;
  };
  const size_t jobs_max_;
  const absl::Duration ageing_bound_;
  std::deque<Entry> waiting_;  // oldest first
};

}  // namespace kvt
