#include "kernels/base/clock.h"

#include <ctime>

namespace kvt {

absl::Time RealClock::Now() const {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return absl::TimeFromTimespec(ts);
}

const RealClock& RealClock::Get() {
  static const RealClock clock;
  return clock;
}

}  // namespace kvt
