// Needles in a real text: with the calibration that comes with the test model selected tokens answer what
// full attention answers; sinks and recent tokens alone do not.
#include "kernels/model/needles.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "kernels/cpu/cpu_device.h"
#include "kernels/model/calibration_file.h"
#include "kernels/model/model_host.h"
#include "tests/support/model_folder.h"

namespace kvt {
namespace {

constexpr int kTokens = 2000;
constexpr int kNeedles = 3;
constexpr int kBudget = 512;
constexpr int kWindowOnly = 160;  // leaves no room for a selected block
constexpr uint64_t kSeed = 20261130;

TEST(Needles, RealModel_TheCalibratedSetFindsThemAndTheWindowAloneDoesNot) {
  const std::string folder = RealModelFolder();
  KVT_SKIP_WITHOUT_MODEL(folder);
  ModelOptions options;
  options.folder = folder;
  const auto host = LoadModelHost(options);
  ASSERT_TRUE(host.ok()) << host.status();
  const auto tokenizer = Tokenizer::Load(folder);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const auto calibration =
      LoadCalibration(KVT_SOURCE_DIR "/deploy/calibrations/SmolLM2-135M-Instruct.cal",
                      host->fingerprint, host->transformer->geometry());
  ASSERT_TRUE(calibration.ok()) << calibration.status();

  // Not among the calibration's texts.
  std::ifstream in("/usr/share/common-licenses/GFDL-1.3");
  const auto ids = (*tokenizer)->Encode(std::string(std::istreambuf_iterator<char>(in), {}),
                                        SpecialTokens::kAsText);
  ASSERT_TRUE(ids.ok()) << ids.status();
  const NeedleText text = PlantNeedles(**tokenizer, *ids, kTokens, kNeedles, 0, kSeed);
  ASSERT_EQ(text.prefix.size(), size_t{kTokens});

  const auto found = FindNeedles(*host->transformer, *calibration, text, kBudget);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->planted, kNeedles);
  EXPECT_GT(found->full, 0);
  EXPECT_GE(found->sparse, found->full);
  const auto window = FindNeedles(*host->transformer, *calibration, text, kWindowOnly);
  ASSERT_TRUE(window.ok()) << window.status();
  EXPECT_EQ(window->full, found->full);
  EXPECT_EQ(window->sparse, 0);
}

}  // namespace
}  // namespace kvt
