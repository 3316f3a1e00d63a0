// The offloaded class through real processes: with a budget that covers everything it is exact, bit for
// bit; with a small one it pulls a part of its bytes; cancelled, or with a store killed under it, it
// leaves nothing behind. Against a reference with the same selections: tests/contract.
#include <atomic>
#include <csignal>
#include <thread>

#include "tests/cluster/cluster_fixture.h"
#include "tests/support/small_calibration.h"

namespace kvt {
namespace {

constexpr int kPrompt = 1500;
constexpr int kOutput = 40;

class OffloadTest : public ClusterTest {
 protected:
  void StartOffloading(const std::string& decode_keys) {
    ClusterSpec spec;
    spec.decodes = 1;
    spec.coordinator_keys = "offload_from_tokens = 400\n";
    spec.model_keys = "calibration = \"" + WriteSmallCalibration(model_.path(), files_) + "\"\n";
    spec.prefill_keys += "selection_tokens = 272\n";
    spec.decode_keys += decode_keys;
    StartCluster(spec);
  }
  ctl::GenerateRequest Sparse(uint64_t seed, uint32_t output) {
    ctl::GenerateRequest request = Request(RandomPrompt(seed, kPrompt), output);
    request.model = cluster_->model();
    request.fidelity = Fidelity::kSparse;
    return request;
  }

  TempFolder files_;
};

TEST_F(OffloadTest, BudgetOfEverything_EqualsTheModelAloneAndIsExact) {
  ASSERT_NO_FATAL_FAILURE(StartOffloading("sparse_budget = 4096\nhot_factor = 1\nfetch_cap = 1\n"));
  const auto reference = ReferenceOrFail(model_.path());
  ASSERT_NE(reference, nullptr);
  for (const uint64_t seed : {31, 32}) {
    const auto expected = reference->Generate(RandomPrompt(seed, kPrompt), kOutput);
    ASSERT_TRUE(expected.ok()) << expected.status();
    const GenerateOutcome outcome = cluster_->Generate(Sparse(seed, kOutput));
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.result.tokens, *expected);
    const DecodeFigures& figures = outcome.result.decode;
    EXPECT_TRUE(figures.offloaded);
    EXPECT_EQ(figures.computed.exact, static_cast<uint64_t>(kOutput - 1));
    EXPECT_EQ(figures.sparse_steps, 0u);
    EXPECT_GT(figures.hot_misses, 0u);
  }
  ExpectNothingHeld();
}

TEST_F(OffloadTest, SmallBudget_AdmissionPullsAPartAndStepsFetchTheRestTheyNeed) {
  ASSERT_NO_FATAL_FAILURE(StartOffloading("sparse_budget = 272\n"));
  const GenerateOutcome outcome = cluster_->Generate(Sparse(33, kOutput));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.result.tokens.size(), static_cast<size_t>(kOutput));
  const DecodeFigures& figures = outcome.result.decode;
  EXPECT_EQ(figures.sequence_bytes, 94 * figures.block_bytes);
  EXPECT_GT(figures.digest_bytes, 0u);
  // 9 or 10 whole blocks and 8 selected ones of 94, and the digests.
  EXPECT_LE(figures.admission_bytes, 18 * figures.block_bytes + figures.digest_bytes);
  EXPECT_EQ(figures.computed.sparse, static_cast<uint64_t>(kOutput - 1));
  EXPECT_GT(figures.write_back_bytes, 0u);
  ExpectNothingHeld();
}

TEST_F(OffloadTest, CancelWhileItSteps_NothingIsHeld) {
  ASSERT_NO_FATAL_FAILURE(StartOffloading("sparse_budget = 272\n"));
  const auto session = cluster_->NewSession();
  std::atomic<int> tokens{0};
  absl::Status status;
  ctl::GenerateResult result;
  std::thread front_end([&] {
    status = session->Run(Sparse(34, 500), [&](int32_t) { ++tokens; }, &result);
  });
  const absl::Status stepping = Await(absl::Seconds(60), [&] {
    return tokens >= 10 ? absl::OkStatus() : absl::UnknownError("not yet");
  });
  EXPECT_TRUE(stepping.ok());
  EXPECT_FALSE(session->Cancel().empty());
  front_end.join();
  EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
  ExpectNothingHeld();
}

TEST_F(OffloadTest, StoreKilledWhileItSteps_RequestEndsWellAndNothingIsHeld) {
  ASSERT_NO_FATAL_FAILURE(StartOffloading("sparse_budget = 272\nhot_factor = 1\n"));
  const auto session = cluster_->NewSession();
  std::atomic<int> tokens{0};
  absl::Status status;
  ctl::GenerateResult result;
  std::thread front_end([&] {
    status = session->Run(Sparse(35, 400), [&](int32_t) { ++tokens; }, &result);
  });
  const absl::Status stepping = Await(absl::Seconds(60), [&] {
    return tokens >= 10 ? absl::OkStatus() : absl::UnknownError("not yet");
  });
  EXPECT_TRUE(stepping.ok());
  cluster_->Signal("store-0", SIGKILL);
  front_end.join();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(result.tokens.size(), 400u);
  ExpectNothingHeld();
}

}  // namespace
}  // namespace kvt
