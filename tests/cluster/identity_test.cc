// Greedy and sampled tokens through a real cluster equal those of the model in one process, bit for
// bit, whatever the batch, the transport and the reuse of prefixes; and decode moves exactly the
// blocks' bytes.
#include "tests/cluster/cluster_fixture.h"

namespace kvt {
namespace {

constexpr int kOutput = 24;

const std::vector<int> kLengths = {10,  15,  16,  17,  31,  32,  33,  48,   64,   65,
                                   100, 130, 200, 256, 300, 513, 700, 1000, 1500, 1900};

std::vector<std::vector<int32_t>> Prompts(uint64_t seed) {
  std::vector<std::vector<int32_t>> prompts;
  for (const int length : kLengths) prompts.push_back(RandomPrompt(seed++, length));
  return prompts;
}

ctl::GenerateRequest ForTenant(const std::string& tenant, std::vector<int32_t> tokens,
                               uint32_t output) {
  ctl::GenerateRequest request = Request(std::move(tokens), output);
  request.tenant = tenant;
  return request;
}

// Every block of the prompt was pulled, both planes, once; no prompt token was computed again.
void ExpectExactBytes(const GenerateOutcome& outcome, size_t prompt_tokens) {
  const DecodeFigures& decode = outcome.result.decode;
  const uint64_t blocks = (prompt_tokens + kBlockTokens - 1) / kBlockTokens;
  EXPECT_EQ(decode.prompt_tokens_computed, 0u);
  EXPECT_EQ(decode.blocks_pulled, blocks);
  const auto expected = static_cast<double>(blocks * decode.block_bytes);
  EXPECT_NEAR(static_cast<double>(decode.pulled_bytes), expected, 0.01 * expected);
  EXPECT_EQ(decode.computed.exact, outcome.result.tokens.size() - 1);
  EXPECT_EQ(decode.computed.base + decode.computed.sparse, 0u);
}

class IdentityTest : public ClusterTest, public testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    ClusterSpec spec;
    spec.transport = GetParam();
    StartClusterAndReference(spec);
  }
};

TEST_P(IdentityTest, Greedy_TwentyPromptsAloneAndEightAtATime_EqualTheModelAlone) {
  const auto prompts = Prompts(7);
  const auto expected = Expected(*reference_, prompts, kOutput);
  for (size_t i = 0; i < prompts.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "alone, prompt of " << prompts[i].size());
    const GenerateOutcome outcome = cluster_->Generate(ForTenant("alone", prompts[i], kOutput));
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    ASSERT_EQ(outcome.result.tokens, expected[i]);
    EXPECT_EQ(outcome.result.finish, FinishReason::kLength);
    ExpectExactBytes(outcome, prompts[i].size());
  }
  for (size_t first = 0; first < prompts.size(); first += 8) {
    std::vector<ctl::GenerateRequest> requests;
    for (size_t i = first; i < std::min(first + 8, prompts.size()); ++i) {
      requests.push_back(ForTenant("eight", prompts[i], kOutput));
    }
    const auto outcomes = cluster_->GenerateAll(std::move(requests));
    for (size_t k = 0; k < outcomes.size(); ++k) {
      SCOPED_TRACE(testing::Message() << "of eight, prompt of " << prompts[first + k].size());
      ASSERT_TRUE(outcomes[k].status.ok()) << outcomes[k].status;
      EXPECT_EQ(outcomes[k].result.tokens, expected[first + k]);
      ExpectExactBytes(outcomes[k], prompts[first + k].size());
    }
  }
  ExpectNothingHeld(absl::Seconds(15));
}

TEST_P(IdentityTest, SharedLongPrefix_SecondRequest_ComputesOnlyTheRest) {
  const std::vector<int32_t> prefix = RandomPrompt(99, 1600);
  for (const int extra : {0, 5, 40}) {
    SCOPED_TRACE(testing::Message() << "prefix and " << extra);
    std::vector<int32_t> prompt = prefix;
    const std::vector<int32_t> rest = RandomPrompt(1000 + static_cast<uint64_t>(extra), extra);
    prompt.insert(prompt.end(), rest.begin(), rest.end());
    const auto expected = reference_->Generate(prompt, kOutput);
    ASSERT_TRUE(expected.ok()) << expected.status();
    const GenerateOutcome outcome = cluster_->Generate(Request(prompt, kOutput));
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.result.tokens, *expected);
    const uint64_t reusable = extra == 0 ? 0 : 1600;
    EXPECT_EQ(outcome.result.prefill.reused_tokens, reusable);
    EXPECT_EQ(outcome.result.prefill.computed_tokens, prompt.size() - reusable);
  }
  // The first answer was written back: the whole dialogue so far is a prefix that exists.
  const auto answer = reference_->Generate(prefix, kOutput);
  ASSERT_TRUE(answer.ok());
  std::vector<int32_t> dialogue = prefix;
  dialogue.insert(dialogue.end(), answer->begin(), answer->end());
  const std::vector<int32_t> question = RandomPrompt(5, 20);
  dialogue.insert(dialogue.end(), question.begin(), question.end());
  const GenerateOutcome next = cluster_->Generate(Request(dialogue, kOutput));
  ASSERT_TRUE(next.status.ok()) << next.status;
  const auto expected = reference_->Generate(dialogue, kOutput);
  ASSERT_TRUE(expected.ok());
  EXPECT_EQ(next.result.tokens, *expected);
  EXPECT_EQ(next.result.prefill.reused_tokens, 1616u);  // 1,600 and one block of the answer
}

TEST_P(IdentityTest, AnotherTenant_SamePrompt_ReusesNothing) {
  const std::vector<int32_t> prompt = RandomPrompt(11, 400);
  for (const char* tenant : {"a", "b"}) {
    const GenerateOutcome outcome = cluster_->Generate(ForTenant(tenant, prompt, 4));
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.result.prefill.reused_tokens, 0u);
  }
}

TEST_P(IdentityTest, SampledWithSeeds_EightAtATime_EqualTheModelAlone) {
  std::vector<ctl::GenerateRequest> requests;
  std::vector<std::vector<int32_t>> expected;
  for (uint64_t i = 0; i < 8; ++i) {
    const std::vector<int32_t> prompt = RandomPrompt(50 + i, static_cast<int>(40 + 60 * i));
    ctl::GenerateRequest request = Request(prompt, 40);
    request.sampling = {.temperature = 0.9, .top_k = 40, .top_p = 0.95, .seed = 1234 + i};
    requests.push_back(request);
    SampleParams params;
    params.temperature = 0.9f;
    params.top_k = 40;
    params.top_p = 0.95f;
    params.seed = 1234 + i;
    const auto answer = reference_->Generate(prompt, 40, params);
    ASSERT_TRUE(answer.ok()) << answer.status();
    expected.push_back(*answer);
  }
  const auto outcomes = cluster_->GenerateAll(requests);
  for (size_t i = 0; i < outcomes.size(); ++i) {
    ASSERT_TRUE(outcomes[i].status.ok()) << outcomes[i].status;
    EXPECT_EQ(outcomes[i].result.tokens, expected[i]) << "request " << i;
  }
}

TEST_P(IdentityTest, StopToken_EndsTheAnswerWithIt) {
  const std::vector<int32_t> prompt = RandomPrompt(21, 90);
  const auto free_run = reference_->Generate(prompt, kOutput);
  ASSERT_TRUE(free_run.ok());
  const int32_t stop = (*free_run)[5];
  const auto expected = reference_->Generate(prompt, kOutput, {}, {stop});
  ASSERT_TRUE(expected.ok());
  ctl::GenerateRequest request = Request(prompt, kOutput);
  request.stop_tokens = {stop};
  const GenerateOutcome outcome = cluster_->Generate(request);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  EXPECT_EQ(outcome.result.tokens, *expected);
  EXPECT_EQ(outcome.result.finish, FinishReason::kStop);
}

INSTANTIATE_TEST_SUITE_P(Transports, IdentityTest, testing::Values("ucx", "shm"));

}  // namespace
}  // namespace kvt
