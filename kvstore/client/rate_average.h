// How fast bytes have come lately: sums of bytes and of time, the older ones counting less and less,
// so that one small transfer says little. Pure; not thread-safe.
#pragma once

#include <cstdint>

#include "absl/time/time.h"

namespace kvt {

// A rate that was not measured for so long is not known any more: the next user tries.
inline constexpr absl::Duration kRateForgottenAfter = absl::Seconds(60);

class RateAverage {
 public:
  void Add(uint64_t amount, absl::Duration took, absl::Time now) {
    if (amount == 0 || took <= absl::ZeroDuration()) return;
    amount_ = amount_ * kKeep + static_cast<double>(amount);
    seconds_ = seconds_ * kKeep + absl::ToDoubleSeconds(took);
    at_ = now;
  }
  // Per second; zero: not known.
  [[nodiscard]] double PerSecond(absl::Time now) const {
    return seconds_ > 0 && now - at_ < kRateForgottenAfter ? amount_ / seconds_ : 0;
  }

 private:
  static constexpr double kKeep = 0.8;  // about the last five count
  double amount_ = 0;
  double seconds_ = 0;
  absl::Time at_;
};

}  // namespace kvt
