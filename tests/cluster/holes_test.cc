// A prompt's blocks lie on three stores; one is killed that held groups from the middle only. The next
// request with that prompt computes those groups in place, and no other token but the last block's;
// its answer is the same, and afterwards nothing is missing.
#include <signal.h>

#include <map>

#include "tests/cluster/cluster_testing.h"

namespace kvt {
namespace {

// 123 blocks: a group of 64, three of 16, one of 11.
constexpr int kPromptTokens = 123 * kBlockTokens;
constexpr uint64_t kGroupOfMiddle = 16;
constexpr uint64_t kBlocksInMiddle = 48;
constexpr int kOutput = 24;

TEST(HolesTest, StoreWithGroupsOfTheMiddleKilled_OnlyThoseAreComputedAgain) {
  SmallModelFolder model;
  ClusterSpec spec;
  spec.model_folder = model.path();
  spec.stores = 3;
  spec.decodes = 1;
  const auto cluster = StartOrFail(spec);
  ASSERT_NE(cluster, nullptr);
  const auto reference = ReferenceOrFail(model.path());
  ASSERT_NE(reference, nullptr);

  // Which store owns which group depends on the prompt: the first that fits.
  std::vector<int32_t> prompt;
  std::string victim;
  uint64_t lost_blocks = 0;
  for (uint64_t seed = 1; victim.empty() && seed < 40; ++seed) {
    prompt = RandomPrompt(7000 + seed, kPromptTokens);
    std::map<std::string, uint64_t> before;
    for (const std::string& store : cluster->NamesOf("store")) {
      before[store] = cluster->Stats(store)->blocks;
    }
    // One token of output: no block but the prompt's.
    const GenerateOutcome first = cluster->Generate(Request(prompt, 1));
    ASSERT_TRUE(first.status.ok()) << first.status;
    ASSERT_EQ(first.result.prefill.computed_tokens, uint64_t{kPromptTokens});
    for (const auto& [store, blocks] : before) {
      const uint64_t here = cluster->Stats(store)->blocks - blocks;
      if (here == 0 || here > kBlocksInMiddle || here % kGroupOfMiddle != 0) continue;
      victim = store;
      lost_blocks = here;
    }
  }
  ASSERT_FALSE(victim.empty()) << "no prompt has a store with groups of the middle alone";
  const auto expected = Expected(*reference, {prompt}, kOutput);
  const absl::Status idle = cluster->AwaitNothingHeld(absl::Seconds(15));
  ASSERT_TRUE(idle.ok()) << idle;

  cluster->Signal(victim, SIGKILL);
  const absl::Status dead = cluster->AwaitState(victim, "dead", absl::Seconds(5));
  ASSERT_TRUE(dead.ok()) << dead;

  const GenerateOutcome again = cluster->Generate(Request(prompt, kOutput));
  ASSERT_TRUE(again.status.ok()) << again.status << cluster->Logs();
  EXPECT_EQ(again.result.tokens, expected[0]);
  EXPECT_EQ(again.result.prefill.computed_tokens, (lost_blocks + 1) * kBlockTokens)
      << victim << " had " << lost_blocks << " blocks";
  EXPECT_EQ(again.result.prefill.reused_tokens,
            kPromptTokens - (lost_blocks + 1) * kBlockTokens);
  // The holes were stored again, elsewhere.
  const GenerateOutcome warm = cluster->Generate(Request(prompt, kOutput));
  ASSERT_TRUE(warm.status.ok()) << warm.status;
  EXPECT_EQ(warm.result.tokens, expected[0]);
  EXPECT_EQ(warm.result.prefill.computed_tokens, uint64_t{kBlockTokens});
  const absl::Status held = cluster->AwaitNothingHeld(absl::Seconds(15));
  EXPECT_TRUE(held.ok()) << held;
}

}  // namespace
}  // namespace kvt
