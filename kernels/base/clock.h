// Time as a seam: production uses the real clock, tests and the simulator their own.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace kvt {

// Monotonic time. Thread-safe. `Now()` has no relation to the calendar.
class Clock {
 public:
  virtual ~Clock() = default;
  [[nodiscard]] virtual absl::Time Now() const = 0;
};

// CLOCK_MONOTONIC, as an absl::Time since an arbitrary origin. Never goes back.
class RealClock final : public Clock {
 public:
  [[nodiscard]] absl::Time Now() const override;
  static const RealClock& Get();
};

// The first multiple of `step` after `now`. Loops that sleep to such times wake together, those of all
// processes of a host: its processors then wake once for all, and find their caches warm.
[[nodiscard]] inline absl::Time NextOnGrid(absl::Time now, absl::Duration step) {
  return absl::UnixEpoch() + absl::Floor(now - absl::UnixEpoch(), step) + step;
}

// Moves only when told. Thread-safe.
class ManualClock final : public Clock {
 public:
  [[nodiscard]] absl::Time Now() const override {
    return absl::FromUnixNanos(now_ns_.load(std::memory_order_acquire));
  }
  void Advance(absl::Duration d) {
    now_ns_.fetch_add(absl::ToInt64Nanoseconds(d), std::memory_order_acq_rel);
  }

 private:
  std::atomic<int64_t> now_ns_{1'000'000'000};
};

}  // namespace kvt
