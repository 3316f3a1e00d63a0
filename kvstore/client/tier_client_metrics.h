// Metrics of a worker's tier client, by store. Owned by the composition root, which calls Update
// about once a second. Not thread-safe.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/base/metrics.h"
#include "kvstore/client/tier_types.h"

namespace kvt {

class TierClientMetrics {
 public:
  // `registry` outlives it.
  explicit TierClientMetrics(MetricsRegistry& registry) : registry_(registry) {}
  // Brings the instruments to `figures` (TierClient::Figures()).
  void Update(absl::Span<const StoreLinkFigures> figures);

 private:
  struct Store {
    Gauge* up;
    Gauge* live_tickets;
    std::vector<Counter*> counters;  // in the order of Counted()
    std::vector<double> seen;
  };
  Store& StoreOf(const NodeName& name);

  MetricsRegistry& registry_;
  std::map<NodeName, Store> stores_;
};

}  // namespace kvt
