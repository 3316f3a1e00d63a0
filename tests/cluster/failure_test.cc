// kill -9 of each kind of daemon while 8 requests run: requests that do not touch the killed process
// keep their tokens, the others end soon with a clear error, the cluster serves on, and nothing that
// the dead held stays held.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "kernels/base/clock.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvt {
namespace {

constexpr int kRequests = 8;
constexpr int kOutput = 300;
// From the kill until every request that fails has ended.
constexpr absl::Duration kEndBound = absl::Seconds(15);

class FailureTest : public ClusterTest {
 protected:
  static std::vector<std::vector<int32_t>> Prompts(uint64_t seed, int tokens) {
    std::vector<std::vector<int32_t>> prompts;
    for (int i = 0; i < kRequests; ++i) {
      prompts.push_back(RandomPrompt(seed + static_cast<uint64_t>(i), tokens + 16 * i));
    }
    return prompts;
  }

  // Runs the requests; when `ready` of them have `tokens` output tokens, kills the daemon.
  std::vector<GenerateOutcome> RunAndKill(const std::vector<std::vector<int32_t>>& prompts,
                                          const std::string& victim, int ready, int tokens) {
    std::vector<GenerateOutcome> outcomes(prompts.size());
    std::vector<absl::Time> ended(prompts.size());
    std::atomic<int> started{0};
    std::vector<std::thread> threads;
    for (size_t i = 0; i < prompts.size(); ++i) {
      threads.emplace_back([&, i] {
        int seen = 0;
        outcomes[i] = cluster_->Generate(Request(prompts[i], kOutput), [&](int32_t) {
          if (++seen == tokens) ++started;
        });
        ended[i] = RealClock::Get().Now();
      });
    }
    const absl::Status running = Await(absl::Seconds(120), [&] {
      return started >= ready ? absl::OkStatus() : absl::DeadlineExceededError("not running yet");
    });
    EXPECT_TRUE(running.ok()) << running;
    cluster_->Signal(victim, SIGKILL);
    const absl::Time killed = RealClock::Get().Now();
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < outcomes.size(); ++i) {
      if (!outcomes[i].status.ok()) failed_after_ = std::max(failed_after_, ended[i] - killed);
    }
    return outcomes;
  }

  void ExpectServesOn(uint64_t seed) {
    const auto prompts = Prompts(seed, 100);
    const auto expected = Expected(*reference_, prompts, 16);
    std::vector<ctl::GenerateRequest> requests;
    for (const auto& prompt : prompts) requests.push_back(Request(prompt, 16));
    const auto outcomes = cluster_->GenerateAll(requests);
    for (size_t i = 0; i < outcomes.size(); ++i) {
      EXPECT_TRUE(outcomes[i].status.ok()) << outcomes[i].status;
      EXPECT_EQ(outcomes[i].result.tokens, expected[i]);
    }
  }

  void ExpectToldAndNothingHeld(const std::string& victim) {
    const absl::Status dead = cluster_->AwaitState(victim, "dead", absl::Seconds(5));
    EXPECT_TRUE(dead.ok()) << dead;
    const auto status = cluster_->coordinator().Status();
    ASSERT_TRUE(status.ok()) << status.status();
    bool told = false;
    for (const ClusterEvent& event : status->events) told |= absl::StrContains(event.text, victim);
    EXPECT_TRUE(told) << "no event names " << victim;
    ExpectNothingHeld(absl::Seconds(15));
  }

  // From the kill until the last request that failed had ended.
  absl::Duration failed_after_;
};

TEST_F(FailureTest, DecodeWorkerKilled_OthersKeepTheirTokensItsRequestsFailClearly) {
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference({}));
  const auto prompts = Prompts(100, 200);
  const auto expected = Expected(*reference_, prompts, kOutput);
  const auto outcomes = RunAndKill(prompts, "decode-0", kRequests, 5);
  int survivors = 0;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const GenerateOutcome& outcome = outcomes[i];
    if (outcome.result.decode_worker == "decode-1") {
      ++survivors;
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.result.tokens, expected[i]);
    } else if (outcome.result.finish == FinishReason::kRunning) {
      EXPECT_TRUE(absl::IsUnavailable(outcome.status)) << outcome.status;
      EXPECT_TRUE(absl::StrContains(outcome.status.message(), "decode-0")) << outcome.status;
      // What had arrived is right.
      EXPECT_TRUE(std::equal(outcome.result.tokens.begin(), outcome.result.tokens.end(),
                             expected[i].begin()));
    }
  }
  EXPECT_GE(survivors, 2);
  EXPECT_LT(failed_after_, kEndBound);
  ExpectToldAndNothingHeld("decode-0");
  ExpectServesOn(9000);
}

TEST_F(FailureTest, PrefillWorkerKilled_HandedOverRequestsGoOnItsOthersFailClearly) {
  ClusterSpec spec;
  spec.prefills = 2;
  spec.prefill_keys += "chunk_tokens = 16\n";  // long enough to be killed within
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference(spec));
  const auto prompts = Prompts(200, 1600);
  const auto expected = Expected(*reference_, prompts, kOutput);
  // The first token of any request: the others still compute.
  const auto outcomes = RunAndKill(prompts, "prefill-0", 1, 1);
  int untouched = 0;
  for (size_t i = 0; i < outcomes.size(); ++i) {
    const GenerateOutcome& outcome = outcomes[i];
    if (outcome.result.prefill_worker == "prefill-1") {
      ++untouched;
      EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    }
    if (outcome.status.ok()) {
      EXPECT_EQ(outcome.result.tokens, expected[i]);
    } else {
      EXPECT_EQ(outcome.result.prefill_worker, "prefill-0");
      EXPECT_TRUE(absl::StrContains(outcome.status.message(), "prefill-0")) << outcome.status;
    }
  }
  EXPECT_GE(untouched, 2);
  EXPECT_LT(failed_after_, kEndBound);
  ExpectToldAndNothingHeld("prefill-0");
  ExpectServesOn(9100);
}

TEST_F(FailureTest, StoreKilledWhileDecoding_NoRequestFails) {
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference({}));
  const auto prompts = Prompts(300, 300);
  const auto expected = Expected(*reference_, prompts, kOutput);
  const auto outcomes = RunAndKill(prompts, "store-0", kRequests, 3);
  ExpectTokens(outcomes, expected);
  ExpectToldAndNothingHeld("store-0");
  // Half of the prefix is lost: recomputed, not an error.
  const GenerateOutcome again = cluster_->Generate(Request(prompts[7], kOutput));
  EXPECT_TRUE(again.status.ok()) << again.status;
  EXPECT_EQ(again.result.tokens, expected[7]);
  ExpectServesOn(9200);
}

TEST_F(FailureTest, StoreKilledWhilePrefilling_CostsRecomputingAndNoError) {
  ClusterSpec spec;
  spec.prefill_keys += "chunk_tokens = 16\n";
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference(spec));
  const auto prompts = Prompts(400, 1200);
  const auto expected = Expected(*reference_, prompts, kOutput);
  const auto outcomes = RunAndKill(prompts, "store-1", 1, 1);
  ExpectTokens(outcomes, expected);
  ExpectToldAndNothingHeld("store-1");
  ExpectServesOn(9300);
}

TEST_F(FailureTest, StoreStopped_RequestsGoOnWithoutIt) {
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference({}));
  const auto prompts = Prompts(500, 300);
  const auto expected = Expected(*reference_, prompts, 16);
  std::vector<ctl::GenerateRequest> requests;
  for (const auto& prompt : prompts) requests.push_back(Request(prompt, 16));
  cluster_->Signal("store-0", SIGSTOP);
  const auto outcomes = cluster_->GenerateAll(requests);
  ExpectTokens(outcomes, expected);
  cluster_->Signal("store-0", SIGCONT);
  const absl::Status back = cluster_->AwaitState("store-0", "ready", absl::Seconds(10));
  EXPECT_TRUE(back.ok()) << back;
  ExpectServesOn(9400);
  ExpectNothingHeld();
}

// The whole tier goes away while requests decode: what they hold on the device is enough to answer.
// New requests are served without it, and by it again when the stores are back.
TEST_F(FailureTest, F14_AllStoresStopped_RunningRequestsAnswerAndNewOnesAreNotHeldUp) {
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference({}));
  const auto prompts = Prompts(600, 200);
  const auto expected = Expected(*reference_, prompts, kOutput);
  RunningRequests running(*cluster_, prompts, kOutput);
  running.ExpectDecoding();
  SignalStores(SIGSTOP);
  const absl::Time stopped = RealClock::Get().Now();
  ExpectTokens(running.Join(), expected);
  ExpectStoresReach("dead", absl::Seconds(10));
  const auto others = Prompts(650, 100);
  const auto other_answers = Expected(*reference_, others, 8);
  for (size_t i = 0; i < 3; ++i) {
    const absl::Time asked = RealClock::Get().Now();
    const GenerateOutcome served = cluster_->Generate(Request(others[i], 8));
    EXPECT_TRUE(served.status.ok()) << served.status;
    EXPECT_EQ(served.result.tokens, other_answers[i]);
    EXPECT_GT(served.result.decode.prompt_tokens_computed, 0u);
    EXPECT_LT(RealClock::Get().Now() - asked, kEndBound);
  }
  RecordProperty("stopped_ms", absl::ToInt64Milliseconds(RealClock::Get().Now() - stopped));
  SignalStores(SIGCONT);
  ExpectStoresReach("ready", absl::Seconds(10));
  ExpectServesOn(9500);
  ExpectNothingHeld();
}

// The stores come and go while prompts are computed and written: requests wait for them, as long as
// the configuration says, and answer.
TEST_F(FailureTest, F14_AllStoresFlap_EveryRequestAnswersWithTheSameTokens) {
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference({}));
  const auto prompts = Prompts(700, 400);
  const auto expected = Expected(*reference_, prompts, 32);
  std::vector<ctl::GenerateRequest> requests;
  for (const auto& prompt : prompts) requests.push_back(Request(prompt, 32));
  std::atomic<bool> done{false};
  std::vector<GenerateOutcome> outcomes;
  std::thread all([&] {
    outcomes = cluster_->GenerateAll(requests);
    done = true;
  });
  // Below the time after which a silent store counts as dead.
  for (int flap = 0; flap < 4; ++flap) {
    SignalStores(SIGSTOP);
    const absl::Time until = RealClock::Get().Now() + absl::Milliseconds(900);
    (void)Await(absl::Seconds(5), [&] {
      return RealClock::Get().Now() >= until ? absl::OkStatus() : absl::UnavailableError("");
    });
    SignalStores(SIGCONT);
    const absl::Time next = RealClock::Get().Now() + absl::Milliseconds(600);
    (void)Await(absl::Seconds(5), [&] {
      return done || RealClock::Get().Now() >= next ? absl::OkStatus() : absl::UnavailableError("");
    });
  }
  all.join();
  ExpectTokens(outcomes, expected);
  ExpectServesOn(9600);
  ExpectNothingHeld();
}

}  // namespace
}  // namespace kvt
