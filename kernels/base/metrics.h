// Counters, gauges and histograms over prometheus-cpp (whose headers stay in metrics.cc). A module's
// <module>_metrics.h owns its instruments and offers verbs. Names:
// kvtide_<module>_<noun>_<unit>[_total]; labels come from closed sets. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvt {

using MetricLabels = std::vector<std::pair<std::string, std::string>>;

class Counter {
 public:
  virtual ~Counter() = default;
  virtual void Add(double n) = 0;
  [[nodiscard]] virtual double Value() const = 0;
};

class Gauge {
 public:
  virtual ~Gauge() = default;
  virtual void Set(double value) = 0;
  [[nodiscard]] virtual double Value() const = 0;
};

class Histogram {
 public:
  virtual ~Histogram() = default;
  virtual void Observe(double value) = 0;
};

// The instruments of one process. Instruments live as long as the registry.
class MetricsRegistry {
 public:
  MetricsRegistry();
  ~MetricsRegistry();
  Counter& NewCounter(absl::string_view name, absl::string_view help, const MetricLabels& labels = {});
  Gauge& NewGauge(absl::string_view name, absl::string_view help, const MetricLabels& labels = {});
  Histogram& NewHistogram(absl::string_view name, absl::string_view help, std::vector<double> bounds,
                          const MetricLabels& labels = {});
  // Serves /metrics on host:port until the registry goes; port 0 picks a free one. Returns the port.
  absl::StatusOr<int> Serve(absl::string_view host, int port);
  // The text exposition format, for tests and the command line.
  [[nodiscard]] std::string Render() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvt
