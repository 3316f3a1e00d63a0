// What the comparison of logits with goldens measures, on distributions worked out by hand, and
// that the random models are what the goldens' script made.
#include "tests/support/model_goldens.h"

#include <gtest/gtest.h>

#include <cmath>

#include "kernels/model/fingerprint.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"

namespace kvt {
namespace {

GoldenPrompt TwoBins() {
  GoldenPrompt prompt;
  prompt.name = "by hand";
  prompt.tokens = {0};
  prompt.tops = {{0, {2, 1}, {std::log(0.5f), std::log(0.25f)}, 0}};
  // Tokens 0 and 3 are the rest: 0.25.
  prompt.dists = {{0, {2, 1}, {std::log(0.5f), std::log(0.25f)}, std::log(0.25f)}};
  return prompt;
}

TEST(GoldenComparison, EqualDistribution_DoesNotDiffer) {
  const GoldenPrompt prompt = TwoBins();
  GoldenComparison comparison(prompt);
  const float shift = 7;  // logits are log-probabilities up to a constant
  comparison.Add(0, {std::log(0.125f) + shift, std::log(0.25f) + shift, std::log(0.5f) + shift,
                     std::log(0.125f) + shift});
  ASSERT_EQ(comparison.kl().size(), 1u);
  EXPECT_NEAR(comparison.kl()[0], 0, 1e-6);
  ASSERT_EQ(comparison.top8_differences().size(), 2u);
  EXPECT_NEAR(comparison.top8_differences()[1], 0, 1e-6);
  EXPECT_EQ(comparison.same_top(), 1);
  EXPECT_EQ(comparison.positions(), 1);
}

TEST(GoldenComparison, OtherDistribution_GivesItsDivergence) {
  const GoldenPrompt prompt = TwoBins();
  GoldenComparison comparison(prompt);
  // 0: 0.25, 1: 0.5, 2: 0.125, 3: 0.125
  comparison.Add(0, {std::log(0.25f), std::log(0.5f), std::log(0.125f), std::log(0.125f)});
  const double expected =
      0.5 * std::log(0.5 / 0.125) + 0.25 * std::log(0.25 / 0.5) + 0.25 * std::log(0.25 / 0.375);
  EXPECT_NEAR(comparison.kl()[0], expected, 1e-6);
  EXPECT_NEAR(comparison.top8_differences()[0], std::log(4.0), 1e-6);
  EXPECT_NEAR(comparison.top8_differences()[1], std::log(2.0), 1e-6);
  EXPECT_EQ(comparison.same_top(), 0);
}

TEST(GoldenStatistics, MeanAndQuantile) {
  EXPECT_EQ(Mean({1, 2, 6}), 3);
  EXPECT_EQ(Quantile({5, 1, 4, 2, 3}, 0.5), 3);
  EXPECT_EQ(Quantile({5, 1, 4, 2, 3}, 1), 5);
  EXPECT_EQ(Quantile({5, 1, 4, 2, 3}, 0.01), 1);
}

TEST(ModelGoldens, CommittedFiles_AreWhole) {
  for (const char* name : {"smollm2_goldens.bin", "random_goldens.bin"}) {
    const auto prompts =
        ReadModelGoldens(std::string(KVT_SOURCE_DIR "/tests/support/goldens/") + name);
    ASSERT_TRUE(prompts.ok()) << prompts.status();
    for (const GoldenPrompt& prompt : *prompts) {
      SCOPED_TRACE(prompt.name);
      EXPECT_EQ(prompt.tops.size(), prompt.tokens.size());
      ASSERT_FALSE(prompt.dists.empty());
      for (const GoldenTokens& dist : prompt.dists) {
        double sum = std::exp(dist.log_rest);
        for (const float log : dist.log_probabilities) sum += std::exp(log);
        EXPECT_NEAR(sum, 1, 1e-4);
      }
    }
  }
}

TEST(ModelGoldens, BrokenFile_IsRefused) {
  TempFolder folder;
  for (const std::string& content :
       {std::string("KVTGOLD"), std::string("KVTGOLD2\0\0\0\0", 12),
        std::string("KVTGOLD1\1\0\0\0", 12), std::string("KVTGOLD1\1\0\0\0\xff\xff\xff\xff", 16),
        std::string("KVTGOLD1\0\0\0\0x", 13)}) {
    folder.Write("goldens", content);
    EXPECT_EQ(ReadModelGoldens(folder.path() + "/goldens").status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

// The fingerprints of the folders that make_random_model.py writes. A change of ModelFingerprint
// shows here too: it makes all stored KV unreachable, so it must be meant.
TEST(RandomModel, Folders_AreThoseOfTheScript) {
  const std::vector<std::string> expected = {
      "7e145870eeb5b1650feb75fddaa28b30", "c5c26df07b8d823b7df6aa7d9c72ce0f",
      "670a10133f00c134a4af8e54178ae253", "086ed2cb567f3aed8c613f7e8f7c17e8",
      "695d99ab2b497e972f0c2143a4e7c582", "4dd22f167beb08940c0c15c8dff4f78f"};
  std::vector<std::string> made;
  for (const RandomModelSpec& spec : RandomModelSpecs()) {
    TempFolder folder;
    WriteRandomModel(spec, folder.path());
    const auto config = LoadModelConfig(folder.path());
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->GroupSize(), spec.heads / spec.kv_heads);
    EXPECT_EQ(config->tied_embeddings, spec.tied);
    const auto weights = Safetensors::Open(folder.path());
    ASSERT_TRUE(weights.ok()) << weights.status();
    const unsigned of_family = config->qkv_bias ? 3 : config->qk_norm ? 2 : 0;
    EXPECT_EQ((*weights)->Names().size(),
              2u + (9u + of_family) * kRandomModelLayers + (spec.tied ? 0 : 1));
    made.push_back(ModelFingerprint(*config, **weights));
  }
  EXPECT_EQ(made, expected);
}

}  // namespace
}  // namespace kvt
