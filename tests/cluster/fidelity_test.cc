// Fidelity through a real cluster: tenants' defaults, the class that the coordinator gives, what an
// offloaded request's prefill leaves in the stores, and who may reuse what was computed sparse.
#include <memory>
#include <string>

#include "tests/cluster/cluster_fixture.h"
#include "tests/support/small_calibration.h"

namespace kvt {
namespace {

constexpr int kPrompt = 708;  // 44 full blocks and a tail
constexpr int kPromptBlocks = kPrompt / kBlockTokens;
constexpr int kOutput = 60;

class FidelityTest : public ClusterTest {
 protected:
  void SetUp() override {
    ClusterSpec spec;
    spec.decodes = 1;
    spec.coordinator_keys =
        "offload_from_tokens = 400\n"
        "tenants = [{name = \"fast\", fidelity = \"sparse\"},"
        " {name = \"careful\", loosest_fidelity = \"exact\"}]\n";
    spec.decode_keys += "sparse_budget = 256\n";
    spec.model_keys = "calibration = \"" + WriteSmallCalibration(model_.path(), files_) + "\"\n";
    StartCluster(spec);
  }

  GenerateOutcome Ask(const std::string& tenant, std::optional<Fidelity> fidelity,
                      std::vector<int32_t> tokens, uint32_t output = kOutput) {
    ctl::GenerateRequest request = Request(std::move(tokens), output);
    request.tenant = tenant;
    request.fidelity = fidelity;
    GenerateOutcome outcome = cluster_->Generate(std::move(request));
    EXPECT_TRUE(outcome.status.ok()) << outcome.status;
    return outcome;
  }
  // Of a request that has ended, once the coordinator has heard of it.
  RequestStatus StatusOf(TicketId id) {
    RequestStatus found;
    const absl::Status status = Await(absl::Seconds(20), [&]() -> absl::Status {
      const auto requests = cluster_->coordinator().Requests();
      if (!requests.ok()) return requests.status();
      for (const RequestStatus& request : *requests) {
        if (request.id != id) continue;
        found = request;
        return request.phase == RequestPhase::kDone ? absl::OkStatus()
                                                    : absl::UnavailableError("not done yet");
      }
      return absl::NotFoundError("no such request");
    });
    EXPECT_TRUE(status.ok()) << status;
    return found;
  }

  TempFolder files_;
};

TEST_F(FidelityTest, TenantsDefault_GivesTheClass_AndDigestsStayInTheStores) {
  const GenerateOutcome plain = Ask("", std::nullopt, RandomPrompt(1, kPrompt));
  EXPECT_EQ(StatusOf(plain.result.id).fidelity, Fidelity::kExact);
  EXPECT_EQ(StatusOf(plain.result.id).request_class, RequestClass::kResident);
  ASSERT_TRUE(cluster_->AwaitNothingHeld(absl::Seconds(20)).ok());
  const uint64_t exact_blocks = cluster_->TotalStats().blocks;
  EXPECT_GE(exact_blocks, static_cast<uint64_t>(kPromptBlocks));

  const GenerateOutcome fast = Ask("fast", std::nullopt, RandomPrompt(2, kPrompt));
  EXPECT_EQ(StatusOf(fast.result.id).fidelity, Fidelity::kSparse);
  EXPECT_EQ(StatusOf(fast.result.id).request_class, RequestClass::kOffloaded);
  ASSERT_TRUE(cluster_->AwaitNothingHeld(absl::Seconds(20)).ok());
  // A digest beside each full block of the prompt.
  EXPECT_GE(cluster_->TotalStats().blocks, exact_blocks + 2 * static_cast<uint64_t>(kPromptBlocks));

  EXPECT_EQ(StatusOf(Ask("fast", std::nullopt, RandomPrompt(3, 100), 10).result.id).request_class,
            RequestClass::kResident) << "too short";
  ctl::GenerateRequest loose = Request(RandomPrompt(4, 100), 10);
  loose.tenant = "careful";
  loose.fidelity = Fidelity::kSparse;
  const GenerateOutcome refused = cluster_->Generate(std::move(loose));
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kPermissionDenied) << refused.status;
}

TEST_F(FidelityTest, SparseAnswer_IsReusedByASparseRequestAndNeverByAnExactOne) {
  const std::vector<int32_t> prompt = RandomPrompt(5, kPrompt);
  const GenerateOutcome first = Ask("", Fidelity::kSparse, prompt);
  ASSERT_EQ(first.result.tokens.size(), static_cast<size_t>(kOutput));
  EXPECT_TRUE(first.result.decode.offloaded);
  EXPECT_GT(first.result.decode.computed.sparse, 0u);
  EXPECT_GT(StatusOf(first.result.id).computed.sparse, 0u);
  ASSERT_TRUE(cluster_->AwaitNothingHeld(absl::Seconds(20)).ok());  // its blocks are published now

  std::vector<int32_t> both = prompt;
  both.insert(both.end(), first.result.tokens.begin(), first.result.tokens.end());
  const uint64_t prompt_blocks_tokens = uint64_t{kPromptBlocks} * kBlockTokens;
  const GenerateOutcome sparse = Ask("", Fidelity::kSparse, both, 8);
  EXPECT_GT(sparse.result.prefill.reused_tokens, prompt_blocks_tokens);
  EXPECT_EQ(StatusOf(sparse.result.id).computed.exact, 0u) << "all of it follows sparse tokens";
  ASSERT_TRUE(cluster_->AwaitNothingHeld(absl::Seconds(20)).ok());

  const GenerateOutcome exact = Ask("", Fidelity::kExact, both, 8);
  EXPECT_EQ(exact.result.prefill.reused_tokens, prompt_blocks_tokens);
  EXPECT_EQ(exact.result.prefill.computed_tokens, both.size() - prompt_blocks_tokens);
  EXPECT_EQ(StatusOf(exact.result.id).computed.sparse, 0u);
  const auto reference = ReferenceOrFail(model_.path());
  ASSERT_NE(reference, nullptr);
  EXPECT_EQ(exact.result.tokens, Expected(*reference, {both}, 8)[0]);
}

}  // namespace
}  // namespace kvt
