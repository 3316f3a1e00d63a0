// The real model and a real text through a real cluster: prompts of 10 to 6,000 tokens, alone and 8
// at a time, equal the model in one process. The small model's tests cover every combination; this
// one runs each prompt once on each transport (KVT_CLUSTER_FULL=1: alone and 8 at a time on both).
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "kernels/model/tokenizer.h"
#include "tests/cluster/cluster_testing.h"

namespace kvt {
namespace {

constexpr int kOutput = 12;
constexpr const char* kText = "/usr/share/common-licenses/GPL-3";
const std::vector<int> kLengths = {10,  24,  48,  63,  64,  65,  100,  150,  200,  256,
                                   300, 400, 513, 640, 800, 1024, 1500, 2100, 3500, 6000};

std::vector<std::vector<int32_t>> Prompts(const Tokenizer& tokenizer) {
  std::stringstream text;
  text << std::ifstream(kText).rdbuf();
  const auto ids = tokenizer.Encode(text.str(), SpecialTokens::kAsText);
  EXPECT_TRUE(ids.ok()) << ids.status();
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < kLengths.size(); ++i) {
    // Other beginnings: no prompt is a prefix of another.
    const auto from = ids->begin() + static_cast<int64_t>(40 * i);
    prompts.emplace_back(from, from + kLengths[i]);
  }
  return prompts;
}

TEST(RealModelTest, TwentyPromptsOfARealText_EqualTheModelAlone) {
  const std::string folder = RealModelFolder();
  KVT_SKIP_WITHOUT_MODEL(folder);
  const auto tokenizer = Tokenizer::Load(folder);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto prompts = Prompts(**tokenizer);
  std::vector<std::vector<int32_t>> expected;
  {
    const auto reference = ReferenceOrFail(folder);
    ASSERT_NE(reference, nullptr);
    expected = Expected(*reference, prompts, kOutput);
  }
  const bool full = std::getenv("KVT_CLUSTER_FULL") != nullptr;
  for (const char* transport : {"ucx", "shm"}) {
    ClusterSpec spec;
    spec.model_folder = folder;
    spec.transport = transport;
    spec.store_keys = "arena_bytes = \"512MiB\"\n";
    const auto cluster = StartOrFail(spec);
    ASSERT_NE(cluster, nullptr);
    for (const bool eight : {false, true}) {
      // One way a transport unless all is asked for.
      if (!full && eight != (std::string(transport) == "shm")) continue;
      SCOPED_TRACE(testing::Message() << transport << (eight ? ", 8 at a time" : ", alone"));
      const size_t at_once = eight ? 8 : 1;
      for (size_t first = 0; first < prompts.size(); first += at_once) {
        std::vector<ctl::GenerateRequest> requests;
        for (size_t i = first; i < std::min(first + at_once, prompts.size()); ++i) {
          requests.push_back(Request(prompts[i], kOutput));
          requests.back().tenant = eight ? "eight" : "alone";
        }
        const auto outcomes = cluster->GenerateAll(std::move(requests));
        for (size_t k = 0; k < outcomes.size(); ++k) {
          const size_t i = first + k;
          ASSERT_TRUE(outcomes[k].status.ok()) << outcomes[k].status << cluster->Logs();
          EXPECT_EQ(outcomes[k].result.tokens, expected[i]) << prompts[i].size() << " tokens";
          const DecodeFigures& decode = outcomes[k].result.decode;
          const auto bytes = static_cast<double>((prompts[i].size() + kBlockTokens - 1) /
                                                 kBlockTokens * decode.block_bytes);
          EXPECT_NEAR(static_cast<double>(decode.pulled_bytes), bytes, 0.01 * bytes);
          EXPECT_EQ(decode.prompt_tokens_computed, 0u);
        }
      }
    }
    const absl::Status held = cluster->AwaitNothingHeld(absl::Seconds(15));
    EXPECT_TRUE(held.ok()) << held;
  }
}

}  // namespace
}  // namespace kvt
