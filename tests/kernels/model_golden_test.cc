// The transformer against implementations that are not ours: llama.cpp on the real model, an f64
// one on small random models. tests/support/goldens/make_model_goldens.py made the goldens.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "kernels/model/model_config.h"
#include "tests/support/logits_runner.h"
#include "tests/support/model_folder.h"
#include "tests/support/model_goldens.h"
#include "tests/support/random_model.h"

namespace kvt {
namespace {

using Compute = TransformerOptions::Compute;

constexpr char kGoldens[] = KVT_SOURCE_DIR "/tests/support/goldens/";
constexpr int kChunk = 256;

// Mean KL, 99th percentile of top-8 log-probability differences, share of equal top tokens.
struct Bounds {
  double kl_mean;
  double top8_p99;
  double same_top;
};
constexpr Bounds kF32Bounds = {1e-5, 0.03, 0};
constexpr Bounds kBf16Bounds = {5e-4, 1e9, 0};
constexpr double kBf16SameTop = 0.985;

// Comparisons of several prompts, taken together.
struct Total {
  int positions = 0, same_top = 0;
  std::vector<double> kl, differences;

  void Add(const GoldenComparison& one) {
    positions += one.positions();
    same_top += one.same_top();
    kl.insert(kl.end(), one.kl().begin(), one.kl().end());
    differences.insert(differences.end(), one.top8_differences().begin(),
                       one.top8_differences().end());
  }
  [[nodiscard]] double SameTop() const { return static_cast<double>(same_top) / positions; }

  void Check(const std::string& name, const Bounds& bounds) const {
    const double kl_mean = Mean(kl), p99 = Quantile(differences, 0.99);
    std::printf(
        "%-28s %5d positions: KL mean %.2e max %.2e, top-8 differences p50 %.4f p99 %.4f "
        "max %.4f, same top token %.2f %%\n",
        name.c_str(), positions, kl_mean, Quantile(kl, 1), Quantile(differences, 0.5), p99,
        Quantile(differences, 1), 100 * SameTop());
    // Written so that a NaN fails.
    EXPECT_TRUE(kl_mean <= bounds.kl_mean) << name << ": " << kl_mean;
    EXPECT_TRUE(p99 <= bounds.top8_p99) << name << ": " << p99;
    EXPECT_TRUE(SameTop() >= bounds.same_top) << name << ": " << SameTop();
  }
};

void Compare(LogitsRunner& runner, const GoldenPrompt& prompt, Total& total) {
  GoldenComparison comparison(prompt);
  const absl::Status status = runner.Run(
      prompt.tokens, kChunk,
      [&](int position, absl::Span<const float> logits) { comparison.Add(position, logits); });
  ASSERT_TRUE(status.ok()) << status;
  total.Add(comparison);
}

std::vector<GoldenPrompt> Goldens(const std::string& name) {
  auto prompts = ReadModelGoldens(kGoldens + name);
  EXPECT_TRUE(prompts.ok()) << prompts.status();
  return prompts.ok() ? *std::move(prompts) : std::vector<GoldenPrompt>();
}

// On a processor that cannot compute in bf16 the load says so.
bool CannotCompute(const absl::Status& status, Compute compute) {
  return compute == Compute::kBf16 &&
         (absl::IsUnimplemented(status) || absl::IsFailedPrecondition(status));
}

void CompareRealModel(Compute compute, const Bounds& bounds, double same_top_of_text) {
  const std::string folder = RealModelFolder();
  KVT_SKIP_WITHOUT_MODEL(folder);
  auto runner = LogitsRunner::Create(folder, compute, 4096);
  if (CannotCompute(runner.status(), compute)) GTEST_SKIP() << runner.status();
  ASSERT_TRUE(runner.ok()) << runner.status();
  std::printf("%s\n", (*runner)->model().numerics_id().c_str());
  Total short_prompts;
  int texts = 0;
  for (const GoldenPrompt& prompt : Goldens("smollm2_goldens.bin")) {
    if (prompt.tokens.size() < 1000) {
      Compare(**runner, prompt, short_prompts);
      continue;
    }
    Total text;
    Compare(**runner, prompt, text);
    ASSERT_GE(text.positions, 2000);
    Bounds of_text = bounds;
    of_text.same_top = same_top_of_text;
    text.Check(prompt.name, of_text);
    ++texts;
  }
  EXPECT_EQ(texts, 2);
  ASSERT_GT(short_prompts.positions, 100);
  short_prompts.Check("short prompts", bounds);
}

TEST(ModelGolden, RealModelF32_IsLlamaCpp) { CompareRealModel(Compute::kF32, kF32Bounds, 0); }

TEST(ModelGolden, RealModelBf16_IsLlamaCpp) {
  CompareRealModel(Compute::kBf16, kBf16Bounds, kBf16SameTop);
}

class RandomModelGolden : public testing::TestWithParam<Compute> {};

TEST_P(RandomModelGolden, EveryShape_IsTheReference) {
  const std::vector<GoldenPrompt> prompts = Goldens("random_goldens.bin");
  ASSERT_EQ(prompts.size(), 2 * RandomModelSpecs().size());
  for (size_t i = 0; i < RandomModelSpecs().size(); ++i) {
    const RandomModelSpec& spec = RandomModelSpecs()[i];
    SCOPED_TRACE(spec.name);
    TempFolder folder;
    WriteRandomModel(spec, folder.path());
    auto runner = LogitsRunner::Create(folder.path(), GetParam(), 512);
    if (CannotCompute(runner.status(), GetParam())) GTEST_SKIP() << runner.status();
    ASSERT_TRUE(runner.ok()) << runner.status();
    Total total;
    for (const size_t p : {2 * i, 2 * i + 1}) {
      ASSERT_EQ(prompts[p].name, spec.name);
      Compare(**runner, prompts[p], total);
    }
    total.Check(spec.name, GetParam() == Compute::kF32 ? kF32Bounds : kBf16Bounds);
  }
}

INSTANTIATE_TEST_SUITE_P(Compute, RandomModelGolden, testing::Values(Compute::kF32, Compute::kBf16),
                         [](const auto& param) {
                           return param.param == Compute::kF32 ? "F32" : "Bf16";
                         });

}  // namespace
}  // namespace kvt
