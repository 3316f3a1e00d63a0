// Instruments of the coordinator, set from its status. Owned by main; not thread-safe.
#pragma once

#include <array>

#include "kernels/base/metrics.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt {

class CoordinatorMetrics {
 public:
  explicit CoordinatorMetrics(MetricsRegistry& registry);
  void Observe(const ClusterStatus& status);

 private:
  static constexpr int kKinds = 4;
  std::array<Gauge*, kKinds> alive_{};
  std::array<Gauge*, kKinds> dead_{};
  Gauge& running_;
  Counter& admitted_;
  Counter& done_;
  Counter& failed_;
  Counter& cancelled_;
  Counter& refused_;
};

}  // namespace kvt
