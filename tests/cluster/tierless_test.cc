// F14: every store is killed (kill -9). Requests that decode finish, new ones are served without the
// tier (decode computes their prompts), and the tier serves again when the stores were started anew.
#include <signal.h>

#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "kernels/base/clock.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvt {
namespace {

constexpr int kRequests = 4;
// The stores' absence may cost a request so long, on a machine that does other things too.
constexpr absl::Duration kServedWithin = absl::Seconds(30);

class TierlessTest : public ClusterTest {
 protected:
  void StartTierless() {
    ClusterSpec spec;
    spec.prefill_keys += "store_wait = \"2s\"\n";
    ASSERT_NO_FATAL_FAILURE(StartClusterAndReference(spec));
  }
  bool IsTold(absl::string_view text) {
    const auto status = cluster_->coordinator().Status();
    EXPECT_TRUE(status.ok()) << status.status();
    if (!status.ok()) return false;
    for (const ClusterEvent& event : status->events) {
      if (absl::StrContains(event.text, text)) return true;
    }
    return false;
  }
};

TEST_F(TierlessTest, F14_AllStoresKilled_RunningRequestsFinishNewOnesAreServedAndTheTierComesBack) {
  ASSERT_NO_FATAL_FAILURE(StartTierless());
  std::vector<std::vector<int32_t>> prompts;
  for (uint64_t i = 0; i < kRequests; ++i) prompts.push_back(RandomPrompt(800 + i, 200));
  const auto expected = Expected(*reference_, prompts, 300);
  RunningRequests running(*cluster_, prompts, 300);
  running.ExpectDecoding();
  SignalStores(SIGKILL);
  // At once, with a placement of dead stores: prefill waits store_wait for them, then goes on.
  const auto early_prompt = RandomPrompt(850, 500);
  const GenerateOutcome early = cluster_->Generate(Request(early_prompt, 24));
  EXPECT_TRUE(early.status.ok()) << early.status;
  EXPECT_EQ(early.result.tokens, Expected(*reference_, {early_prompt}, 24)[0]);
  ExpectTokens(running.Join(), expected);
  ExpectStoresReach("dead", absl::Seconds(20));

  // Admitted without a placement, several at once, with prompts of several chunks and a tail.
  std::vector<std::vector<int32_t>> fresh;
  std::vector<ctl::GenerateRequest> requests;
  for (uint64_t i = 0; i < kRequests; ++i) {
    fresh.push_back(RandomPrompt(900 + i, 150 + 333 * static_cast<int>(i)));
    requests.push_back(Request(fresh.back(), 40));
  }
  const auto answers = Expected(*reference_, fresh, 40);
  const absl::Time asked = RealClock::Get().Now();
  const auto served = cluster_->GenerateAll(requests);
  EXPECT_LT(RealClock::Get().Now() - asked, kServedWithin);
  for (size_t i = 0; i < served.size(); ++i) {
    EXPECT_TRUE(served[i].status.ok()) << served[i].status;
    EXPECT_EQ(served[i].result.tokens, answers[i]) << "request " << i;
    EXPECT_EQ(served[i].result.prefill.computed_tokens, fresh[i].size());
    EXPECT_EQ(served[i].result.decode.prompt_tokens_computed, fresh[i].size());
  }
  EXPECT_TRUE(IsTold("served without the tier"));

  for (const std::string& store : cluster_->NamesOf("store")) {
    const absl::Status started = cluster_->Restart(store);
    EXPECT_TRUE(started.ok()) << started;
  }
  ExpectStoresReach("ready", absl::Seconds(20));
  // The workers' links come up by themselves; from then on the tier is used.
  absl::Status back;
  for (int tries = 0; tries < 20; ++tries) {
    const GenerateOutcome again = cluster_->Generate(Request(fresh[1], 40));
    ASSERT_TRUE(again.status.ok()) << again.status;
    EXPECT_EQ(again.result.tokens, answers[1]);
    const bool reused = again.result.prefill.reused_tokens > 0;
    back = reused && again.result.decode.prompt_tokens_computed == 0
               ? absl::OkStatus()
               : absl::UnavailableError("the tier is not used");
    if (back.ok()) break;
  }
  EXPECT_TRUE(back.ok()) << back;
  EXPECT_TRUE(IsTold("use the tier again"));
  ExpectNothingHeld();
}

TEST_F(TierlessTest, F14_CancelledWhileDecodeComputesThePrompt_EverythingComesBack) {
  ASSERT_NO_FATAL_FAILURE(StartTierless());
  SignalStores(SIGKILL);
  ExpectStoresReach("dead", absl::Seconds(20));
  for (int i = 0; i < 3; ++i) {
    const auto session = cluster_->NewSession();
    ctl::GenerateRequest request = Request(RandomPrompt(950, 1900), 100);
    request.model = cluster_->model();
    std::atomic<int> tokens{0};
    absl::Status status;
    ctl::GenerateResult result;
    std::thread front_end(
        [&] { status = session->Run(request, [&](int32_t) { ++tokens; }, &result); });
    // The first token is prefill's; decode then has 15 chunks to compute.
    EXPECT_TRUE(Await(absl::Seconds(60), [&] {
                  return tokens >= 1 + i ? absl::OkStatus() : absl::UnknownError("no token");
                }).ok());
    (void)session->Cancel();
    front_end.join();
    EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
  }
  ExpectNothingHeld();
  const auto prompt = RandomPrompt(960, 100);
  const GenerateOutcome after = cluster_->Generate(Request(prompt, 8));
  EXPECT_TRUE(after.status.ok()) << after.status;
  EXPECT_EQ(after.result.tokens, Expected(*reference_, {prompt}, 8)[0]);
}

}  // namespace
}  // namespace kvt
