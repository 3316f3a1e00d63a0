#include "kernels/select/calibration.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace kvt {
namespace {

Calibration Example() {
  Calibration c;
  c.model = "0123456789abcdef0123456789abcdef";
  c.geometry = {2, 3, 32};
  c.layers.resize(2);
  for (const int kv_head : {2, 0}) {
    CalibrationHead head{kv_head, {}, {}};
    for (int d = 0; d < 32; ++d) {
      head.offset.push_back(static_cast<float>(d) / 3.0f - 4.0f);
      head.scale.push_back(1.0f / static_cast<float>(7 + d));
    }
    c.layers[0].heads.push_back(head);
  }
  c.layers[0].best = 2;
  c.layers[0].runner_up = 1;
  c.layers[0].margin = 1.0 / 3;
  c.layers[0].miss_least = 22;
  c.layers[0].miss_step = 11;
  c.layers[0].misses = {7.25, 3.125, 1.0 / 3};
  c.layers[0].losses = {0.0625, 1.0 / 300, 1e-5};
  return c;
}

TEST(Calibration, Text_ReadsBackToTheSameBytes) {
  const Calibration c = Example();
  const std::string text = c.ToText();
  const absl::StatusOr<Calibration> read = Calibration::Parse(text, "x.cal");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->ToText(), text);
  EXPECT_EQ(read->Id(), c.Id());
  EXPECT_EQ(read->layers[0].heads[1].kv_head, 0);
  EXPECT_EQ(read->layers[0].heads[0].scale, c.layers[0].heads[0].scale);
  EXPECT_TRUE(read->layers[1].heads.empty());
}

TEST(Calibration, Id_ChangesWithEveryPart) {
  const Calibration c = Example();
  Calibration other = c;
  other.layers[0].heads[0].scale[5] *= 1.0001f;
  EXPECT_NE(other.Id(), c.Id());
  other = c;
  other.model[0] = 'f';
  EXPECT_NE(other.Id(), c.Id());
  other = c;
  other.bits = 3;
  EXPECT_NE(other.Id(), c.Id());
}

TEST(Calibration, DigestBytesShare_CountsHeadsOverAllLayers) {
  // Two heads of three in one of two layers, 4 bits: (2 / 24) / 2.
  EXPECT_NEAR(Example().DigestBytesShare(), 1.0 / 24, 1e-12);
}

TEST(Calibration, EditedCutOrMalformed_IsRefusedWithFileAndLine) {
  const std::string text = Example().ToText();
  struct Edit {
    const char* from;
    const char* to;
    const char* message;
  };
  for (const Edit& edit : {Edit{"bits 4", "bits 3", "the id does not match"},
                           Edit{"bits 4", "bits 5", "x.cal:4"},
                           Edit{"kvtide-calibration 1", "kvtide-calibration 2", "x.cal:1"},
                           Edit{"geometry 2 3 32", "geometry 2 3 33", "x.cal:3"},
                           Edit{"layer 0 heads 2 0", "layer 0 heads 3 0", "x.cal:5"},
                           Edit{"losses 0 0.0625", "losses 0 0.001", "losses are not falling"},
                           Edit{"losses 0 0.0625", "losses 0", "expected 3 losses"},
                           Edit{"layer 1 dense", "layer 1", "expected \"dense\""},
                           Edit{"channels 0 2 ", "channels 0 2 nan ", "expected 64 numbers"}}) {
    const auto read = Calibration::Parse(absl::StrReplaceAll(text, {{edit.from, edit.to}}), "x.cal");
    ASSERT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument) << edit.to;
    EXPECT_NE(read.status().message().find(edit.message), absl::string_view::npos) << read.status();
    EXPECT_NE(read.status().message().find("x.cal:"), absl::string_view::npos) << read.status();
  }
  // Cut after every line.
  const std::vector<std::string> lines = absl::StrSplit(text, '\n');
  std::string part;
  for (size_t i = 0; i + 2 < lines.size(); ++i) {
    EXPECT_FALSE(Calibration::Parse(part, "x.cal").ok()) << i << " lines";
    part += lines[i] + "\n";
  }
}

}  // namespace
}  // namespace kvt
