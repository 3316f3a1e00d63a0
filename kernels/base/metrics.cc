#include "kernels/base/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <exception>
#include <map>

#include "absl/strings/str_cat.h"
#include "kernels/base/mutex.h"

namespace kvt {
namespace {

class PrometheusCounter final : public Counter {
 public:
  explicit PrometheusCounter(prometheus::Counter& counter) : counter_(counter) {}
  void Add(double n) override { counter_.Increment(n); }
  double Value() const override { return counter_.Value(); }

 private:
  prometheus::Counter& counter_;
};

class PrometheusGauge final : public Gauge {
 public:
  explicit PrometheusGauge(prometheus::Gauge& gauge) : gauge_(gauge) {}
  void Set(double value) override { gauge_.Set(value); }
  double Value() const override { return gauge_.Value(); }

 private:
  prometheus::Gauge& gauge_;
};

class PrometheusHistogram final : public Histogram {
 public:
  explicit PrometheusHistogram(prometheus::Histogram& histogram) : histogram_(histogram) {}
  void Observe(double value) override { histogram_.Observe(value); }

 private:
  prometheus::Histogram& histogram_;
};

prometheus::Labels ToLabels(const MetricLabels& labels) {
  return prometheus::Labels(labels.begin(), labels.end());
}

}  // namespace

struct MetricsRegistry::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  Mutex mu;
  std::vector<std::unique_ptr<Counter>> counters ABSL_GUARDED_BY(mu);
  std::vector<std::unique_ptr<Gauge>> gauges ABSL_GUARDED_BY(mu);
  std::vector<std::unique_ptr<Histogram>> histograms ABSL_GUARDED_BY(mu);
  std::unique_ptr<prometheus::Exposer> exposer;
};

MetricsRegistry::MetricsRegistry() : impl_(std::make_unique<Impl>()) {}
MetricsRegistry::~MetricsRegistry() = default;

Counter& MetricsRegistry::NewCounter(absl::string_view name, absl::string_view help,
                                     const MetricLabels& labels) {
  auto& family = prometheus::BuildCounter().Name(std::string(name)).Help(std::string(help)).Register(
      *impl_->registry);
  MutexLock lock(impl_->mu);
  impl_->counters.push_back(std::make_unique<PrometheusCounter>(family.Add(ToLabels(labels))));
  return *impl_->counters.back();
}

Gauge& MetricsRegistry::NewGauge(absl::string_view name, absl::string_view help,
                                 const MetricLabels& labels) {
  auto& family = prometheus::BuildGauge().Name(std::string(name)).Help(std::string(help)).Register(
      *impl_->registry);
  MutexLock lock(impl_->mu);
  impl_->gauges.push_back(std::make_unique<PrometheusGauge>(family.Add(ToLabels(labels))));
  return *impl_->gauges.back();
}

Histogram& MetricsRegistry::NewHistogram(absl::string_view name, absl::string_view help,
                                         std::vector<double> bounds, const MetricLabels& labels) {
  auto& family = prometheus::BuildHistogram()
                     .Name(std::string(name))
                     .Help(std::string(help))
                     .Register(*impl_->registry);
  MutexLock lock(impl_->mu);
  impl_->histograms.push_back(
      std::make_unique<PrometheusHistogram>(family.Add(ToLabels(labels), std::move(bounds))));
  return *impl_->histograms.back();
}

absl::StatusOr<int> MetricsRegistry::Serve(absl::string_view host, int port) {
  try {
    impl_->exposer =
        std::make_unique<prometheus::Exposer>(absl::StrCat(host, ":", port), /*num_threads=*/1);
    impl_->exposer->RegisterCollectable(impl_->registry);
    return impl_->exposer->GetListeningPorts().front();
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("metrics endpoint ", host, ":", port, ": ", error.what()));
  }
}

std::string MetricsRegistry::Render() const {
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect());
}

}  // namespace kvt
