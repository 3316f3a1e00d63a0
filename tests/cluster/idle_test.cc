// An idle cluster sleeps: no poll loops anywhere.
#include <algorithm>
#include <vector>

#include "kernels/base/clock.h"
#include "tests/cluster/cluster_testing.h"

namespace kvt {
namespace {

constexpr double kShareMax = 0.03;  // of one core, all six together
// Of one process in a second: about 20 are needed. A loop that polls every millisecond has a thousand,
// however fast the machine is.
constexpr double kSleepsMax = 100;
constexpr absl::Duration kWindow = absl::Seconds(6);
constexpr int kWindows = 4;

struct IdleFigures {
  double share = 1;
  double sleeps = 0;     // of the busiest process, per second
  std::string by_process;  // for a failing test's message

  [[nodiscard]] bool Good() const { return share < kShareMax && sleeps < kSleepsMax; }
};

IdleFigures Measure(const TestCluster& cluster) {
  const std::vector<ProcessorUse> before = cluster.ProcessorUseNow();
  const absl::Time began = RealClock::Get().Now();
  (void)Await(kWindow, [] { return absl::UnknownError("the time is not over"); });
  const std::vector<ProcessorUse> after = cluster.ProcessorUseNow();
  const double seconds = absl::ToDoubleSeconds(RealClock::Get().Now() - began);
  IdleFigures figures;
  figures.share = 0;
  for (size_t i = 0; i < after.size(); ++i) {
    const double share = absl::ToDoubleSeconds(after[i].processor - before[i].processor) / seconds;
    const double sleeps = static_cast<double>(after[i].sleeps - before[i].sleeps) / seconds;
    figures.share += share;
    figures.sleeps = std::max(figures.sleeps, sleeps);
    absl::StrAppend(&figures.by_process, after[i].name, ": ", 100 * share, " %, ", sleeps,
                    " sleeps a second\n");
  }
  return figures;
}

TEST(IdleTest, SixProcesses_UseUnderThreePercentOfACore) {
  SmallModelFolder model;
  ClusterSpec spec;
  spec.model_folder = model.path();
  for (const char* transport : {"ucx", "shm"}) {
    SCOPED_TRACE(transport);
    spec.transport = transport;
    const auto cluster = StartOrFail(spec);
    ASSERT_NE(cluster, nullptr);
    // Sessions, channels and threads are all in use once.
    ASSERT_TRUE(cluster->Generate(Request(RandomPrompt(1, 100), 8)).status.ok());
    ASSERT_TRUE(cluster->AwaitNothingHeld(absl::Seconds(15)).ok());
    // All six are counted.
    ASSERT_EQ(cluster->ProcessorUseNow().size(), 6u);
    for (const ProcessorUse& use : cluster->ProcessorUseNow()) {
      ASSERT_GT(use.processor, absl::ZeroDuration()) << use.name;
      ASSERT_GT(use.sleeps, 0) << use.name;
    }
    // Other work on the machine empties caches, and every waking then costs more: the least disturbed
    // of the windows counts. A poll loop shows in each.
    IdleFigures best;
    for (int window = 0; window < kWindows && !best.Good(); ++window) {
      const IdleFigures figures = Measure(*cluster);
      if (figures.Good() || figures.share < best.share) best = figures;
    }
    EXPECT_LT(best.share, kShareMax) << best.by_process;
    EXPECT_LT(best.sleeps, kSleepsMax) << best.by_process;
    RecordProperty(std::string("idle_share_percent_") + transport, absl::StrCat(100 * best.share));
    RecordProperty(std::string("idle_sleeps_a_second_") + transport, absl::StrCat(best.sleeps));
  }
}

}  // namespace
}  // namespace kvt
