// Sparse decoding of a sequence, selection by digests, and calibration, on seeded random models.
#include "kernels/model/text_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/model/calibrator.h"
#include "kernels/model/digest_selector.h"
#include "kernels/model/model_config.h"
#include "kernels/select/attention_stats.h"
#include "tests/support/model_folder.h"
#include "tests/support/random_model.h"

namespace kvt {
namespace {

constexpr uint64_t kSeed = 20261202;
constexpr int kPrefix = 500;
constexpr int kRows = 40;

class TextRunTest : public ::testing::Test {
 protected:
  void SetUp() override {
    WriteRandomModel(RandomModelSpecs()[1], temp_.path());
    device_ = MakeCpuDevice({.threads = 2}).value();
    model_ = Transformer::Load(temp_.path(), *device_, {}).value();
    tokens_ = Tokens(kPrefix + kRows, kSeed);
  }
  std::vector<int32_t> Tokens(int count, uint64_t seed) const {
    Random random(seed);
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens) {
      token = static_cast<int32_t>(random.Below(static_cast<uint64_t>(model_->config().vocab)));
    }
    return tokens;
  }
  std::unique_ptr<TextRun> Prefilled() {
    auto run = TextRun::Create(*model_, kPrefix + kRows).value();
    EXPECT_TRUE(run->Prefill(absl::MakeConstSpan(tokens_).first(kPrefix), 0, nullptr).ok());
    return run;
  }
  std::vector<float> Decode(TextRun& run, int rows, const TextRun::Selector& selector) {
    return run.Decode(absl::MakeConstSpan(tokens_).subspan(kPrefix, static_cast<size_t>(rows)),
                      kPrefix, selector).value();
  }
  static RowSelections Full(int, int, const LayerActivations&) { return RowSelections::Full(); }
  // Blocks of each row's middle that are a multiple of `step`, perhaps for each of `heads`.
  static RowSelections Every(int step, int heads, int first, int rows) {
    RowSelections selections;
    selections.by_head = heads > 1;
    for (int i = 0; i < rows * heads; ++i) {
      std::vector<int32_t>& blocks = selections.blocks.emplace_back();
      const MiddleBlocks middle = MiddleOf(first + i / heads);
      for (int b = middle.first; b < middle.end; ++b) {
        if (b % step == 0) blocks.push_back(b);
      }
    }
    return selections;
  }
  static bool Same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

  TempFolder temp_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Transformer> model_;
  std::vector<int32_t> tokens_;
};

TEST_F(TextRunTest, SelectionOfEverything_IsFullAttentionBitForBit) {
  const auto run = Prefilled();
  const std::vector<float> full = Decode(*run, kRows, &Full);
  const std::vector<float> all = Decode(*run, kRows, [](int, int first, const LayerActivations& a) {
    return Every(1, 1, first, a.rows);
  });
  EXPECT_TRUE(Same(full, all));
  const std::vector<float> half = Decode(*run, kRows, [](int, int first, const LayerActivations& a) {
    return Every(2, 1, first, a.rows);
  });
  EXPECT_FALSE(Same(full, half));
}

TEST_F(TextRunTest, RowsInOneCall_AreStepsOneAfterAnother) {
  const auto select = [](int, int first, const LayerActivations& a) {
    return Every(3, 1, first, a.rows);
  };
  const auto run = Prefilled();
  const std::vector<float> together = Decode(*run, kRows, select);
  const auto other = Prefilled();
  std::vector<float> alone;
  for (int r = 0; r < kRows; ++r) {
    const std::vector<float> row =
        other->Decode({&tokens_[static_cast<size_t>(kPrefix + r)], 1}, kPrefix + r, select).value();
    alone.insert(alone.end(), row.begin(), row.end());
  }
  EXPECT_TRUE(Same(together, alone));
}

TEST_F(TextRunTest, ByHeadWithEqualLists_IsOneListForAll) {
  const auto run = Prefilled();
  const int heads = model_->geometry().kv_heads;
  ASSERT_GT(heads, 1);
  const std::vector<float> one = Decode(*run, 9, [](int, int first, const LayerActivations& a) {
    return Every(2, 1, first, a.rows);
  });
  const std::vector<float> by_head =
      Decode(*run, 9, [&](int, int first, const LayerActivations& a) {
        return Every(2, heads, first, a.rows);
      });
  EXPECT_TRUE(Same(one, by_head));
}

TEST_F(TextRunTest, DigestSelector_BudgetForEverythingSelectsTheMiddle_ASmallOneTheBestOfIt) {
  const auto run = Prefilled();
  const auto dim = static_cast<size_t>(model_->geometry().head_dim);
  std::vector<std::vector<CalibrationHead>> heads(static_cast<size_t>(model_->geometry().layers));
  heads[1] = {{1, std::vector<float>(dim, 0), std::vector<float>(dim, 0.3f)}};
  const auto selector = DigestSelector::Create(*run, 4, heads).value();
  EXPECT_TRUE(selector->dense(0));
  const std::vector<float> logits = Decode(*run, kRows, [&](int layer, int first,
                                                            const LayerActivations& a) {
    if (selector->dense(layer)) return RowSelections::Full();
    EXPECT_TRUE(selector->MakeDigests(layer, 0, kPrefix / kBlockTokens).ok());
    std::vector<int> positions;
    for (int r = 0; r < a.rows; ++r) positions.push_back(first + r);
    const auto all = selector->Select(layer, positions, a.qkv, a.qkv_stride, 1 << 20).value();
    const auto few = selector->Select(layer, positions, a.qkv, a.qkv_stride, 256).value();
    const auto scores = selector->Score(layer, positions, a.qkv, a.qkv_stride).value();
    for (int r = 0; r < a.rows; ++r) {
      const auto row = static_cast<size_t>(r);
      EXPECT_EQ(all[row], Every(1, 1, first + r, 1).blocks[0]);
      std::vector<int32_t> best = TopBlocks(scores[row], SelectedBlocks(256, first + r));
      for (int32_t& b : best) b += MiddleOf(first + r).first;
      EXPECT_EQ(few[row], best);
      EXPECT_LE(few[row].size(), 7u);
    }
    return RowSelections{false, false, all};
  });
  EXPECT_TRUE(Same(logits, Decode(*run, kRows, &Full)));
}

TEST_F(TextRunTest, Calibrator_SameTexts_SameBytesAndEveryHeadRanked) {
  CalibratorOptions options;
  options.lengths = {1024};
  options.queries = 16;
  options.set.digest_share_max = 0.1;  // of two heads: 1/16 each
  std::string first;
  for (int round = 0; round < 2; ++round) {
    auto calibrator = Calibrator::Create(*model_, "fingerprint", options).value();
    const absl::Status refused = calibrator->AddText(Tokens(1000, kSeed));
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    ASSERT_TRUE(calibrator->AddText(Tokens(1024, kSeed + 1)).ok());
    ASSERT_TRUE(calibrator->AddText(Tokens(1100, kSeed + 2)).ok());
    const absl::StatusOr<CalibrationReport> report = calibrator->Finish();
    ASSERT_TRUE(report.ok()) << report.status();
    const std::string text = report->calibration.ToText();
    if (round == 0) first = text;
    EXPECT_EQ(text, first);
    EXPECT_LE(report->calibration.DigestBytesShare(), 0.1);
    EXPECT_TRUE(Calibration::Parse(text, "x").ok());
    for (const LayerReport& layer : report->layers) {
      EXPECT_EQ(layer.captured.all.rows, 2 * 16 * model_->config().heads);
      EXPECT_GT(layer.captured.all.mass, 0.2);
      EXPECT_LE(layer.captured.all.mass, 1.0001);
      EXPECT_EQ(layer.choice.best, std::max_element(layer.measure.excess.begin(),
                                                    layer.measure.excess.end()) -
                                       layer.measure.excess.begin());
      EXPECT_EQ(layer.best_by_text.size(), 2u);
    }
  }
}

}  // namespace
}  // namespace kvt
