// Workers that stop (SIGTERM) or lost the coordinator while requests run: what they have ends well or
// clearly, and they take nothing new.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "kernels/base/clock.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/cluster/cluster_fixture.h"

namespace kvt {
namespace {

constexpr int kRequests = 6;

class DrainTest : public ClusterTest {
 protected:
  void TearDown() override {
    JoinRequests();
    ClusterTest::TearDown();
  }

  // Starts requests of `output` tokens each. As soon as one of them has its third token, a worker that
  // decodes is told to stop: its name.
  std::string StopADecodeWorkerUnderLoad(uint64_t seed, int output) {
    outcomes_.resize(kRequests);
    for (int i = 0; i < kRequests; ++i) {
      prompts_.push_back(RandomPrompt(seed + static_cast<uint64_t>(i), 60 + 16 * i));
    }
    for (size_t i = 0; i < prompts_.size(); ++i) {
      threads_.emplace_back([this, i, output] {
        int seen = 0;
        outcomes_[i] = cluster_->Generate(
            Request(prompts_[i], static_cast<uint32_t>(output)),
            [&](int32_t) { if (++seen == 3 && !stopping_.exchange(true)) StopOne(); });
      });
    }
    const absl::Status stopped = Await(absl::Seconds(120), [&] {
      return stopped_ ? absl::OkStatus() : absl::DeadlineExceededError("nothing decodes");
    });
    EXPECT_TRUE(stopped.ok()) << stopped;
    return victim_;
  }
  void StopOne() {
    const absl::Status found = Await(absl::Seconds(20), [&]() -> absl::Status {
      const auto requests = cluster_->coordinator().Requests();
      if (!requests.ok()) return requests.status();
      for (const RequestStatus& request : *requests) {
        if (request.phase != RequestPhase::kDecode) continue;
        victim_ = request.decode_worker;
        cluster_->Signal(victim_, SIGTERM);
        return absl::OkStatus();
      }
      return absl::NotFoundError("no request decodes");
    });
    EXPECT_TRUE(found.ok()) << found;
    stopped_ = true;
  }
  static std::string OtherThan(const std::string& decode) {
    return decode == "decode-0" ? "decode-1" : "decode-0";
  }
  void JoinRequests() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  // The coordinator has seen it drain, or go.
  void ExpectToldOfDrain(const std::string& name) {
    const absl::Status told = Await(absl::Seconds(20), [&]() -> absl::Status {
      const auto status = cluster_->coordinator().Status();
      if (!status.ok()) return status.status();
      for (const ClusterEvent& event : status->events) {
        if (absl::StrContains(event.text, name) && absl::StrContains(event.text, "drains")) {
          return absl::OkStatus();
        }
      }
      return absl::NotFoundError("no event of its drain");
    });
    EXPECT_TRUE(told.ok()) << told;
  }
  void ExpectServedBy(const std::string& decode, uint64_t seed) {
    const auto prompt = RandomPrompt(seed, 80);
    const GenerateOutcome served = cluster_->Generate(Request(prompt, 8));
    EXPECT_TRUE(served.status.ok()) << served.status;
    EXPECT_EQ(served.result.decode_worker, decode);
    EXPECT_EQ(served.result.tokens, Expected(*reference_, {prompt}, 8)[0]);
  }

  std::vector<std::vector<int32_t>> prompts_;
  std::vector<GenerateOutcome> outcomes_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> stopped_{false};
  std::string victim_;  // before stopped_
};

TEST_F(DrainTest, DecodeWorkerStopsUnderLoad_ItsRequestsFinishAndNewOnesGoElsewhere) {
  ClusterSpec spec;
  spec.decode_keys += "drain_timeout = \"2m\"\n";
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference(spec));
  const std::string victim = StopADecodeWorkerUnderLoad(1000, 600);
  ExpectToldOfDrain(victim);
  ExpectServedBy(OtherThan(victim), 1100);
  JoinRequests();
  const auto expected = Expected(*reference_, prompts_, 600);
  int there = 0;
  for (size_t i = 0; i < outcomes_.size(); ++i) {
    EXPECT_TRUE(outcomes_[i].status.ok()) << outcomes_[i].status;
    EXPECT_EQ(outcomes_[i].result.tokens, expected[i]) << "request " << i;
    there += outcomes_[i].result.decode_worker == victim ? 1 : 0;
  }
  EXPECT_GT(there, 0);
  // Idle, it goes by itself, long before its time is over.
  const absl::Status gone = Await(absl::Seconds(30), [&]() -> absl::Status {
    const auto node = cluster_->Node(victim);
    if (!node.ok()) return absl::OkStatus();
    return node->state == "dead" ? absl::OkStatus() : absl::UnavailableError(node->state);
  });
  EXPECT_TRUE(gone.ok()) << gone;
  ExpectServedBy(OtherThan(victim), 1110);
  ExpectNothingHeld();
}

TEST_F(DrainTest, DecodeWorkerStopsAndRequestsOutlastItsTime_TheyFailClearlyOthersGoOn) {
  ClusterSpec spec;
  spec.decode_keys += "drain_timeout = \"0s\"\n";
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference(spec));
  const std::string victim = StopADecodeWorkerUnderLoad(1200, 1800);
  JoinRequests();
  const auto expected = Expected(*reference_, prompts_, 1800);
  int failed = 0;
  for (size_t i = 0; i < outcomes_.size(); ++i) {
    const GenerateOutcome& outcome = outcomes_[i];
    // What had arrived is right, whatever came then.
    EXPECT_TRUE(std::equal(outcome.result.tokens.begin(), outcome.result.tokens.end(),
                           expected[i].begin()));
    if (outcome.status.ok()) {
      EXPECT_EQ(outcome.result.tokens.size(), expected[i].size());
      continue;
    }
    ++failed;
    // Or its hand-over was under way, and prefill was told.
    const bool lost = absl::IsUnavailable(outcome.status) &&
                      absl::StrContains(outcome.status.message(), victim);
    const bool ended = outcome.result.decode_worker.empty() &&
                       absl::StrContains(outcome.status.message(), "ended by the coordinator");
    EXPECT_TRUE(lost || ended) << outcome.status;
    EXPECT_TRUE(ended || outcome.result.decode_worker == victim) << outcome.result.decode_worker;
  }
  EXPECT_GT(failed, 0) << "1,800 tokens were decoded before the signal arrived";
  ExpectServedBy(OtherThan(victim), 1300);
  ExpectNothingHeld();
}

// Its lease at the coordinator is over: someone else may have been given its work.
TEST_F(DrainTest, CoordinatorOutOfReach_WorkersRefuseNewWorkUntilItIsBack) {
  ClusterSpec spec;
  spec.decodes = 1;
  spec.coordinator_keys = "lease = \"3s\"\n";
  ASSERT_NO_FATAL_FAILURE(StartClusterAndReference(spec));
  const auto decode_at = cluster_->Node("decode-0");
  const auto prefill_at = cluster_->Node("prefill-0");
  ASSERT_TRUE(decode_at.ok() && prefill_at.ok());
  const auto decode = ConnectDecode(decode_at->control_address, absl::Seconds(5));
  const auto prefill = ConnectPrefill(prefill_at->control_address, absl::Seconds(5));
  // No ticket at all: who looks at it says so, who is fenced does not look.
  const auto fenced = [&] {
    const absl::Status offered = decode->HandOver({});
    const absl::Status submitted =
        prefill->Submit({}, [](const PrefillEvent&) { return true; });
    const auto refused = [](const absl::Status& status) {
      return absl::IsUnavailable(status) && absl::StrContains(status.message(), "lost its lease");
    };
    return std::make_pair(refused(offered), refused(submitted));
  };
  const auto expect = [&](bool both, absl::string_view when) {
    const absl::Status so = Await(absl::Seconds(30), [&] {
      return fenced() == std::make_pair(both, both)
                 ? absl::OkStatus()
                 : absl::UnavailableError(both ? "not fenced" : "fenced");
    });
    EXPECT_TRUE(so.ok()) << when << ": " << so;
  };
  expect(false, "at first");
  cluster_->Signal("coordinator", SIGSTOP);
  expect(true, "without a coordinator");
  cluster_->Signal("coordinator", SIGCONT);
  expect(false, "when it is back");
  ExpectServedBy("decode-0", 1410);
}

}  // namespace
}  // namespace kvt
