#include "kernels/model/unicode_nfc.h"

#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <fstream>
#include <random>
#include <vector>

#include "absl/strings/escaping.h"
#include "nlohmann/json.hpp"

namespace kvt {
namespace {

using nlohmann::json;

const json& Goldens() {
  static const json* const goldens = new json(
      json::parse(std::ifstream(KVT_SOURCE_DIR "/tests/support/goldens/nfc_goldens.json")));
  return *goldens;
}

std::string Nfc(absl::string_view text) {
  std::string room = "left from before";
  return std::string(ToNfc(text, room));
}

std::string Utf8(uint32_t code_point) {
  std::string text;
  if (code_point < 0x80) {
    text += static_cast<char>(code_point);
    return text;
  }
  const int more = code_point < 0x800 ? 1 : code_point < 0x10000 ? 2 : 3;
  text += static_cast<char>((0xFF00 >> (more + 1) & 0xFF) | code_point >> 6 * more);
  for (int i = more - 1; i >= 0; --i) {
    text += static_cast<char>(0x80 | (code_point >> 6 * i & 0x3F));
  }
  return text;
}

TEST(ToNfc, EveryCodePoint_EqualsUnicodedata) {
  ASSERT_EQ(NfcUnicodeVersion(), Goldens()["unicode"].get<std::string>());
  uint32_t next = 0;
  for (const json& range : Goldens()["ranges"]) {
    ASSERT_EQ(range["first"].get<uint32_t>(), next);
    std::string lines;
    for (; next <= range["last"].get<uint32_t>(); ++next) {
      if (next >= 0xD800 && next < 0xE000) continue;
      const std::string character = Utf8(next);
      for (const std::string& text : {character, "a" + character, character + "\xCC\x81\xCC\xA3"}) {
        lines += Nfc(text);
        lines += '\n';
      }
    }
    std::string digest(SHA256_DIGEST_LENGTH, '\0');
    SHA256(reinterpret_cast<const uint8_t*>(lines.data()), lines.size(),
           reinterpret_cast<uint8_t*>(digest.data()));
    EXPECT_EQ(absl::BytesToHexString(digest), range["sha256"].get<std::string>())
        << "code points from " << range["first"];
  }
  EXPECT_EQ(next, 0x110000u);
}

TEST(ToNfc, GoldenStrings_EqualUnicodedata) {
  ASSERT_GT(Goldens()["strings"].size(), 100u);
  for (const json& golden : Goldens()["strings"]) {
    const auto text = golden[0].get<std::string>(), expected = golden[1].get<std::string>();
    EXPECT_EQ(Nfc(text), expected) << golden.dump(-1, ' ', true);
    EXPECT_EQ(Nfc(expected), expected) << golden.dump(-1, ' ', true);
  }
}

// The fast path takes eight bytes at a time: each place in them, and each length of what follows.
TEST(ToNfc, AnyOffset_GivesTheSame) {
  std::string all, all_expected;
  for (int before = 0; before < 20; ++before) {
    for (int after = 0; after < 20; ++after) {
      std::string tail;
      for (int i = 0; i < after; ++i) tail += "\xC3\xA9";
      const std::string given = std::string(before, 'x') + "e\xCC\x81" + tail;
      const std::string expected = std::string(before, 'x') + "\xC3\xA9" + tail;
      EXPECT_EQ(Nfc(given), expected) << before << " " << after;
      all += given;
      all_expected += expected;
    }
  }
  EXPECT_EQ(Nfc(all), all_expected);
}

TEST(ToNfc, InertText_IsGivenBackItself) {
  std::string room;
  for (const std::string text :
       {"", "plain text, long enough for the fast path", "r\xC3\xA9sum\xC3\xA9 \xC3\xA9",
        "\xE6\x88\x91\xE5\x96\x9C\xE6\xAC\xA2 \xEA\xB0\x81 \xF0\x9F\x99\x82"}) {
    const absl::string_view view = text;
    EXPECT_EQ(ToNfc(view, room).data(), view.data()) << text;
    EXPECT_EQ(ToNfc(view, room).size(), view.size());
  }
}

// A million marks of five classes after one letter: sorted by class, in bounded time.
TEST(ToNfc, EndlessMarks_AreSortedStably) {
  constexpr uint32_t kMarks[] = {0x0345, 0x0302, 0x0323, 0x0334, 0x0327};  // 240 230 220 1 202
  constexpr int kInOrder[] = {3, 4, 2, 1, 0};
  std::mt19937 generator(11);
  std::string text = "b";
  std::vector<int> counts(5, 0);
  for (int i = 0; i < 1'000'000; ++i) {
    const uint32_t pick = generator() % 5;
    text += Utf8(kMarks[pick]);
    ++counts[pick];
  }
  // b joins U+0323 (dot below), which nothing of its class stands before.
  std::string expected = Utf8(0x1E05);
  --counts[2];
  for (const int mark : kInOrder) {
    for (int i = 0; i < counts[mark]; ++i) expected += Utf8(kMarks[mark]);
  }
  EXPECT_TRUE(Nfc(text) == expected);
}

// The parts of a text may be normalised apart where a part begins with an inert character: what
// stands before a special token does not change with what follows it.
TEST(ToNfc, RandomText_IsTheSameInPartsAndTwice) {
  std::mt19937 generator(12);
  for (int round = 0; round < 300; ++round) {
    std::string whole, parts;
    for (int part = 0; part < 4; ++part) {
      std::string text = "k";
      for (int i = static_cast<int>(generator() % 12); i > 0; --i) {
        static constexpr uint32_t kFirst[] = {0x20,   0xC0,   0x300, 0x1100,
                                              0x1160, 0xAC00, 0x900, 0x1E00};
        text += Utf8(kFirst[generator() % 8] + generator() % 80);
      }
      whole += text;
      parts += Nfc(text);
    }
    EXPECT_EQ(Nfc(whole), parts);
    EXPECT_EQ(Nfc(parts), parts);
  }
}

}  // namespace
}  // namespace kvt
