#include "kernels/model/calibration_file.h"

#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/scratch_folder.h"

namespace kvt {
namespace {

using ::testing::HasSubstr;

Calibration Example() {
  Calibration c;
  c.model = "0123456789abcdef0123456789abcdef";
  c.geometry = Geometry{.layers = 2, .kv_heads = 3, .head_dim = 32};
  c.layers.resize(2);
  c.layers[1].heads.push_back({.kv_head = 1,
                               .offset = std::vector<float>(32, 0.25f),
                               .scale = std::vector<float>(32, 0.5f)});
  return c;
}

class CalibrationFile : public ::testing::Test {
 protected:
  std::string Write(const std::string& text) {
    const std::string path = folder_.path() + "/x.cal";
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  static std::string Message(const absl::StatusOr<Calibration>& read) {
    return std::string(read.status().message());
  }
  ScratchFolder folder_;
};

TEST_F(CalibrationFile, OfThisModel_IsReadWhole) {
  const Calibration c = Example();
  const auto read = LoadCalibration(Write(c.ToText()), c.model, c.geometry);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->Id(), c.Id());
  EXPECT_EQ(read->DigestBytesByLayer(), std::vector<uint32_t>({0, 16 * 32 * 4 / 8}));
}

TEST_F(CalibrationFile, OfAnotherModelOrGeometry_IsRefusedNamingFileFieldAndBothSides) {
  const Calibration c = Example();
  const std::string path = Write(c.ToText());
  const auto model = LoadCalibration(path, "feed", c.geometry);
  EXPECT_TRUE(absl::IsFailedPrecondition(model.status()));
  EXPECT_THAT(Message(model), HasSubstr(path + ": model: calibrated for " + c.model));
  EXPECT_THAT(Message(model), HasSubstr("feed"));
  Geometry other = c.geometry;
  other.kv_heads = 2;
  const auto geometry = LoadCalibration(path, c.model, other);
  EXPECT_TRUE(absl::IsFailedPrecondition(geometry.status()));
  EXPECT_THAT(Message(geometry), HasSubstr(path + ": geometry: calibrated for L2 H3 D32"));
  EXPECT_THAT(Message(geometry), HasSubstr("L2 H2 D32"));
}

TEST_F(CalibrationFile, ThatIsMissingOrCut_IsRefusedNamingIt) {
  const Calibration c = Example();
  const auto missing = LoadCalibration(folder_.path() + "/none.cal", c.model, c.geometry);
  EXPECT_TRUE(absl::IsNotFound(missing.status()));
  EXPECT_THAT(Message(missing), HasSubstr("none.cal"));
  const std::string text = c.ToText();
  const auto cut = LoadCalibration(Write(text.substr(0, text.size() / 2)), c.model, c.geometry);
  EXPECT_TRUE(absl::IsInvalidArgument(cut.status()));
  EXPECT_THAT(Message(cut), HasSubstr("x.cal:"));
}

}  // namespace
}  // namespace kvt
