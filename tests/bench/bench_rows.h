// Rows of a benchmark, interleaved measurements of several ways, and their ratios by round. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvt {

struct Row {
  std::string name;
  double value = 0;
  std::string unit;
};

// {"rows": [...]}; false when it cannot be written. Nothing for an empty path.
bool WriteRows(const std::string& path, const std::vector<Row>& rows);

double Quantile(std::vector<double> values, double share);
inline double Median(std::vector<double> values) { return Quantile(std::move(values), 0.5); }

// One way of moving the same bytes.
struct Way {
  std::string name;
  uint64_t bytes = 0;  // of one run
  std::function<void()> run;
  std::vector<double> gbps;  // by round
  double worker_cpu = 0;     // seconds, all rounds
  double store_cpu = 0;
  double gib = 0;
};

Way* FindWay(std::vector<Way>& ways, const std::string& name);

// One measurement on a machine that others use too: `measure` returns its seconds, `waited` the seconds
// that the measured programs' threads have waited for a processor so far (null: unknown). Repeated, at
// most kMeasureTries times, while they waited for more than kWaitShareMax of the time; the least
// disturbed counts. So every contender is treated.
inline constexpr int kMeasureTries = 8;
inline constexpr double kWaitShareMax = 0.03;
double LeastDisturbedSeconds(const std::function<double()>& measure,
                             const std::function<double()>& waited);

// Runs it so and notes rate and processor time; `store_cpu_seconds` may be null.
void Measure(Way& way, const std::function<double()>& store_cpu_seconds,
             const std::function<double()>& waited);

void PrintWays(const std::vector<Way>& ways);

// Prints and adds `row`: the median over rounds of ours / theirs in the same round, so that noise
// that lasts longer than a round cancels.
void AddRatio(std::vector<Way>& ways, const std::string& ours, const std::string& theirs,
              const std::string& row, std::vector<Row>& rows);

}  // namespace kvt
