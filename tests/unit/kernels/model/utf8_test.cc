#include "kernels/model/utf8.h"

#include <gtest/gtest.h>

#include "kernels/base/random.h"

namespace kvt {
namespace {

TEST(Utf8, ValidPrefix_EndsAtTheFirstBrokenByte) {
  EXPECT_EQ(ValidUtf8Prefix(""), 0u);
  EXPECT_EQ(ValidUtf8Prefix("plain text of more than eight bytes"), 35u);
  EXPECT_EQ(ValidUtf8Prefix("é東🙂"), 9u);
  EXPECT_EQ(ValidUtf8Prefix("12345678\xf0\x9f\x99"), 8u);
  EXPECT_EQ(ValidUtf8Prefix("\xf0\x80\x80\x80"), 0u);
  EXPECT_EQ(ValidUtf8Prefix("\xe0\x9f\x80"), 0u);
  EXPECT_EQ(ValidUtf8Prefix("\xef\xbf\xbf\xf4\x8f\xbf\xbf"), 7u);
}

TEST(Utf8Stream, EveryCodePoint_CutAnywhere_ComesBack) {
  for (uint32_t code_point = 0x80; code_point < 0x110000; code_point += 37) {
    if (code_point >= 0xD800 && code_point < 0xE000) continue;
    std::string text;
    if (code_point < 0x800) {
      text = {static_cast<char>(0xC0 | code_point >> 6),
              static_cast<char>(0x80 | (code_point & 0x3F))};
    } else if (code_point < 0x10000) {
      text = {static_cast<char>(0xE0 | code_point >> 12),
              static_cast<char>(0x80 | (code_point >> 6 & 0x3F)),
              static_cast<char>(0x80 | (code_point & 0x3F))};
    } else {
      text = {static_cast<char>(0xF0 | code_point >> 18),
              static_cast<char>(0x80 | (code_point >> 12 & 0x3F)),
              static_cast<char>(0x80 | (code_point >> 6 & 0x3F)),
              static_cast<char>(0x80 | (code_point & 0x3F))};
    }
    Utf8Stream stream;
    std::string out;
    for (const char c : text) {
      EXPECT_EQ(out, "");
      out += stream.Append(absl::string_view(&c, 1));
    }
    ASSERT_EQ(out, text) << code_point;
    ASSERT_EQ(stream.Finish(), "");
  }
}

TEST(Utf8Stream, BrokenSequences_BecomeOneReplacementEach) {
  const std::pair<std::string, std::string> cases[] = {
      {"a\xf0\x9f\x99z", "a\uFFFDz"},  // cut by another character
      {"\xe2\x82", "\uFFFD"},          // cut by the end
      {"\xe2\x28\xa1", "\uFFFD(\uFFFD"},
      {"\xed\xa0\x80", "\uFFFD\uFFFD\uFFFD"},  // surrogate: no valid part beyond the first byte
      {"\xc0\xaf", "\uFFFD\uFFFD"},
      {"\xf5\x80", "\uFFFD\uFFFD"},
  };
  for (const auto& [bytes, expected] : cases) {
    Utf8Stream stream;
    std::string out = stream.Append(bytes);
    EXPECT_EQ(out + stream.Finish(), expected);
  }
}

TEST(Utf8Stream, RandomBytes_TheCutsDoNotMatter) {
  const uint64_t seed = 20261129;
  SCOPED_TRACE(seed);
  Random random(seed);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    // Lead and continuation bytes more often than chance would have them.
    constexpr uint8_t kPool[] = {0x41, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc1, 0xc2,
                                 0xe0, 0xe1, 0xed, 0xef, 0xf0, 0xf1, 0xf4, 0xf5, 0xff};
    for (size_t i = random.Below(24); i > 0; --i)
      bytes += static_cast<char>(kPool[random.Below(sizeof(kPool))]);
    Utf8Stream whole, cut;
    std::string expected = whole.Append(bytes);
    expected += whole.Finish();
    std::string out;
    for (size_t at = 0; at < bytes.size();) {
      const size_t count = 1 + random.Below(3);
      out += cut.Append(absl::string_view(bytes).substr(at, count));
      at += count;
    }
    ASSERT_EQ(out + cut.Finish(), expected);
    ASSERT_EQ(ValidUtf8Prefix(expected), expected.size());
  }
}

}  // namespace
}  // namespace kvt
