// An idle cluster sleeps: no poll loops anywhere.
#include <algorithm>

#include "kernels/base/clock.h"
#include "tests/cluster/cluster_testing.h"

namespace kvt {
namespace {

constexpr double kShareMax = 0.03;  // of one core, all six together

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
    // Other work on the machine empties caches, and every waking then costs more: the least disturbed
    // of three windows counts. A poll loop shows in each.
    double share = 1;
    for (int window = 0; window < 3 && share >= kShareMax; ++window) {
      const double before = cluster->ProcessorSeconds();
      const absl::Time began = RealClock::Get().Now();
      (void)Await(absl::Seconds(8), [] { return absl::UnknownError("the time is not over"); });
      const double used = cluster->ProcessorSeconds() - before;
      share = std::min(share, used / absl::ToDoubleSeconds(RealClock::Get().Now() - began));
    }
    EXPECT_LT(share, kShareMax);
    RecordProperty(std::string("idle_share_percent_") + transport, absl::StrCat(100 * share));
  }
}

}  // namespace
}  // namespace kvt
