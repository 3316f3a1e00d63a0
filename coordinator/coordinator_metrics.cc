#include "coordinator/coordinator_metrics.h"

#include <string>

namespace kvt {
namespace {

Counter& Outcome(MetricsRegistry& registry, const char* outcome) {
  return registry.NewCounter("kvtide_coordinator_requests_total", "Requests by what became of them",
                             {{"outcome", outcome}});
}

void Raise(Counter& counter, uint64_t to) { counter.Add(static_cast<double>(to) - counter.Value()); }

}  // namespace

CoordinatorMetrics::CoordinatorMetrics(MetricsRegistry& registry)
    : running_(registry.NewGauge("kvtide_coordinator_requests_running",
                                 "Requests admitted and not finished")),
      admitted_(Outcome(registry, "admitted")),
      done_(Outcome(registry, "done")),
      failed_(Outcome(registry, "failed")),
      cancelled_(Outcome(registry, "cancelled")),
      refused_(Outcome(registry, "refused")) {
  const char* kinds[kKinds] = {"store", "prefill", "decode", "client"};
  for (int i = 0; i < kKinds; ++i) {
    alive_[i] = &registry.NewGauge("kvtide_coordinator_nodes", "Nodes by kind and state",
                                   {{"kind", kinds[i]}, {"state", "alive"}});
    dead_[i] = &registry.NewGauge("kvtide_coordinator_nodes", "Nodes by kind and state",
                                  {{"kind", kinds[i]}, {"state", "dead"}});
  }
}

void CoordinatorMetrics::Observe(const ClusterStatus& status) {
  std::array<int, kKinds> alive{};
  std::array<int, kKinds> dead{};
  for (const NodeStatus& node : status.nodes) {
    ++(node.state == "dead" ? dead : alive)[static_cast<size_t>(node.kind)];
  }
  for (size_t i = 0; i < kKinds; ++i) {
    alive_[i]->Set(alive[i]);
    dead_[i]->Set(dead[i]);
  }
  running_.Set(static_cast<double>(status.running));
  Raise(admitted_, status.admitted);
  Raise(done_, status.done);
  Raise(failed_, status.failed);
  Raise(cancelled_, status.cancelled);
  Raise(refused_, status.refused);
}

}  // namespace kvt
