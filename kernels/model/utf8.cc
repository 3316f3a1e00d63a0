#include "kernels/model/utf8.h"

#include <cstdint>
#include <cstring>

namespace kvt {
namespace {

constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";

enum class Form { kValid, kBroken, kCut };
struct Sequence {
  Form form;
  size_t bytes;  // that belong to it: of a broken or cut one, its maximal valid part, at least 1
};

// The sequence at the start of `text`, which is not empty.
Sequence FirstSequence(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {Form::kValid, 1};
  size_t length = 0;
  uint8_t low = 0x80, high = 0xBF;  // of the second byte
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;   // overlong
    if (lead == 0xED) high = 0x9F;  // surrogates
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;   // overlong
    if (lead == 0xF4) high = 0x8F;  // beyond U+10FFFF
  } else {
    return {Form::kBroken, 1};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {Form::kCut, i};
    if (byte(i) < low || byte(i) > high) return {Form::kBroken, i};
    low = 0x80;
    high = 0xBF;
  }
  return {Form::kValid, length};
}

// Bytes of ASCII at the start, in steps of 8.
size_t AsciiRun(absl::string_view text) {
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t eight;
    std::memcpy(&eight, text.data() + i, 8);
    if ((eight & 0x8080808080808080ull) != 0) break;
  }
  return i;
}

}  // namespace

size_t ValidUtf8Prefix(absl::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    at += AsciiRun(text.substr(at));
    if (at == text.size()) break;
    const Sequence next = FirstSequence(text.substr(at));
    if (next.form != Form::kValid) break;
    at += next.bytes;
  }
  return at;
}

std::string Utf8Stream::Append(absl::string_view bytes) {
  held_.append(bytes.data(), bytes.size());
  std::string text;
  absl::string_view rest = held_;
  while (!rest.empty()) {
    const size_t valid = ValidUtf8Prefix(rest);
    text.append(rest.data(), valid);
    rest.remove_prefix(valid);
    if (rest.empty()) break;
    const Sequence next = FirstSequence(rest);
    if (next.form == Form::kCut) break;
    text.append(kReplacement.data(), kReplacement.size());
    rest.remove_prefix(next.bytes);
  }
  held_ = std::string(rest);
  return text;
}

std::string Utf8Stream::Finish() {
  std::string text(held_.empty() ? "" : kReplacement);
  held_.clear();
  return text;
}

}  // namespace kvt
