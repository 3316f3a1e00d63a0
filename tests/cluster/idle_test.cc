// An idle cluster sleeps: no poll loops anywhere.
#include "kernels/base/clock.h"
#include "tests/cluster/cluster_testing.h"

namespace kvt {
namespace {

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
    const double before = cluster->ProcessorSeconds();
    const absl::Time began = RealClock::Get().Now();
    (void)Await(absl::Seconds(8), [] { return absl::UnknownError("the time is not over"); });
    const double used = cluster->ProcessorSeconds() - before;
    const double share = used / absl::ToDoubleSeconds(RealClock::Get().Now() - began);
    EXPECT_LT(share, 0.03);
    RecordProperty(std::string("idle_share_percent_") + transport, absl::StrCat(100 * share));
  }
}

}  // namespace
}  // namespace kvt
