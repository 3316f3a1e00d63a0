// A test with a cluster of its own that serves the small model, and requests that run meanwhile.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cluster/cluster_testing.h"

namespace kvt {

// The cluster's logs are printed when the test failed.
class ClusterTest : public testing::Test {
 protected:
  // In a test: ASSERT_NO_FATAL_FAILURE(StartCluster(spec)). The folder of the model is filled in.
  void StartCluster(ClusterSpec spec) {
    spec.model_folder = model_.path();
    cluster_ = StartOrFail(spec);
    ASSERT_NE(cluster_, nullptr);
  }
  // The model alone too.
  void StartClusterAndReference(ClusterSpec spec) {
    ASSERT_NO_FATAL_FAILURE(StartCluster(std::move(spec)));
    reference_ = ReferenceOrFail(model_.path());
    ASSERT_NE(reference_, nullptr);
  }
  void TearDown() override {
    if (HasFailure() && cluster_ != nullptr) ADD_FAILURE() << cluster_->Logs();
  }

  void ExpectNothingHeld(absl::Duration within = absl::Seconds(20)) {
    const absl::Status held = cluster_->AwaitNothingHeld(within);
    EXPECT_TRUE(held.ok()) << held;
  }
  void SignalStores(int signal) {
    for (const std::string& store : cluster_->NamesOf("store")) cluster_->Signal(store, signal);
  }
  void ExpectStoresReach(const std::string& state, absl::Duration within) {
    for (const std::string& store : cluster_->NamesOf("store")) {
      const absl::Status reached = cluster_->AwaitState(store, state, within);
      EXPECT_TRUE(reached.ok()) << reached;
    }
  }
  static void ExpectTokens(const std::vector<GenerateOutcome>& outcomes,
                           const std::vector<std::vector<int32_t>>& expected) {
    ASSERT_EQ(outcomes.size(), expected.size());
    for (size_t i = 0; i < outcomes.size(); ++i) {
      EXPECT_TRUE(outcomes[i].status.ok()) << outcomes[i].status;
      EXPECT_EQ(outcomes[i].result.tokens, expected[i]) << "request " << i;
    }
  }

  SmallModelFolder model_;
  std::unique_ptr<TestCluster> cluster_;
  std::unique_ptr<ReferenceModel> reference_;
};

// Requests that run until they end, one thread each. The cluster outlives it.
class RunningRequests {
 public:
  RunningRequests(TestCluster& cluster, std::vector<std::vector<int32_t>> prompts,
                  uint32_t output_tokens)
      : outcomes_(prompts.size()) {
    for (size_t i = 0; i < prompts.size(); ++i) {
      threads_.emplace_back([this, &cluster, i, output_tokens, prompt = std::move(prompts[i])] {
        int seen = 0;
        outcomes_[i] = cluster.Generate(Request(prompt, output_tokens), [&](int32_t) {
          if (++seen == kDecodingTokens) ++decoding_;
        });
        if (seen < kDecodingTokens) ++decoding_;
      });
    }
  }
  ~RunningRequests() { Join(); }
  RunningRequests(const RunningRequests&) = delete;
  RunningRequests& operator=(const RunningRequests&) = delete;

  // Until each has its third token, which decode made, or has ended.
  void ExpectDecoding() {
    const absl::Status running = Await(absl::Seconds(120), [&] {
      return decoding_ == static_cast<int>(threads_.size())
                 ? absl::OkStatus()
                 : absl::DeadlineExceededError("not running yet");
    });
    EXPECT_TRUE(running.ok()) << running;
  }
  const std::vector<GenerateOutcome>& Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return outcomes_;
  }

 private:
  static constexpr int kDecodingTokens = 3;

  std::vector<GenerateOutcome> outcomes_;
  std::atomic<int> decoding_{0};  // or ended
  std::vector<std::thread> threads_;
};

}  // namespace kvt
