#include "tests/bench/bench_rows.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>

#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/units.h"

namespace kvt {
namespace {

double OwnCpuSeconds() {
  timespec ts{};
  KVT_CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts) == 0);
  return static_cast<double>(ts.tv_sec) + 1e-9 * static_cast<double>(ts.tv_nsec);
}

}  // namespace

bool WriteRows(const std::string& path, const std::vector<Row>& rows) {
  if (path.empty()) return true;
  std::ofstream out(path);
  out << "{\"rows\":[";
  for (size_t i = 0; i < rows.size(); ++i) {
    out << (i > 0 ? "," : "")
        << absl::StrFormat("{\"name\":\"%s\",\"value\":%.4f,\"unit\":\"%s\"}", rows[i].name,
                           rows[i].value, rows[i].unit);
  }
  out << "]}\n";
  out.close();
  return out.good();
}

double Quantile(std::vector<double> values, double share) {
  KVT_CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size()));
  return values[std::min(at, values.size() - 1)];
}

Way* FindWay(std::vector<Way>& ways, const std::string& name) {
  for (Way& way : ways) {
    if (way.name == name) return &way;
  }
  KVT_CHECK(false, "no way ", name);
}

double LeastDisturbedSeconds(const std::function<double()>& measure,
                             const std::function<double()>& waited) {
  double best = 0;
  double best_share = 2;
  for (int i = 0; i < kMeasureTries && best_share > kWaitShareMax; ++i) {
    const double before = waited == nullptr ? 0 : waited();
    const double seconds = measure();
    const double share = waited == nullptr ? 0 : (waited() - before) / seconds;
    if (share >= best_share && i > 0) continue;
    best = seconds;
    best_share = share;
  }
  return best;
}

void Measure(Way& way, const std::function<double()>& store_cpu_seconds,
             const std::function<double()>& waited) {
  const auto once = [&] {
    const double worker = OwnCpuSeconds();
    const double store = store_cpu_seconds == nullptr ? 0 : store_cpu_seconds();
    const absl::Time start = RealClock::Get().Now();
    way.run();
    const double seconds = absl::ToDoubleSeconds(RealClock::Get().Now() - start);
    way.worker_cpu += OwnCpuSeconds() - worker;
    if (store_cpu_seconds != nullptr) way.store_cpu += store_cpu_seconds() - store;
    way.gib += static_cast<double>(way.bytes) / static_cast<double>(kGiB);
    return seconds;
  };
  way.gbps.push_back(static_cast<double>(way.bytes) / LeastDisturbedSeconds(once, waited) / 1e9);
}

void PrintWays(const std::vector<Way>& ways) {
  std::printf("  %-28s %8s %17s  %s\n", "", "GB/s", "quartiles", "CPU s/GiB worker + store");
  for (const Way& way : ways) {
    std::printf("  %-28s %8.2f   %6.2f to %5.2f  %10.2f + %.2f\n", way.name.c_str(),
                Median(way.gbps), Quantile(way.gbps, 0.25), Quantile(way.gbps, 0.75),
                way.worker_cpu / way.gib, way.store_cpu / way.gib);
  }
}

void AddRatio(std::vector<Way>& ways, const std::string& ours, const std::string& theirs,
              const std::string& row, std::vector<Row>& rows) {
  const Way& a = *FindWay(ways, ours);
  const Way& b = *FindWay(ways, theirs);
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(a.gbps.size(), b.gbps.size()); ++i) {
    ratios.push_back(a.gbps[i] / b.gbps[i]);
  }
  const double median = Median(ratios);
  std::printf("  %-28s %6.2f   (quartiles %.2f to %.2f)\n", row.c_str(), median,
              Quantile(ratios, 0.25), Quantile(ratios, 0.75));
  rows.push_back({row, median, "ratio"});
}

}  // namespace kvt
