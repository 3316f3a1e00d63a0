#include "kernels/model/tokenizer_split.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace kvt {
namespace {

// White_Space of Unicode. PCRE2's \s has U+180E too, which left White_Space with Unicode 6.3.
constexpr absl::string_view kWhiteSpace = "\\t-\\r\\x{20}\\x{85}\\p{Z}";

// Replaces \s and, outside of classes, \S.
std::string WithWhiteSpace(absl::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char escaped = pattern[++i];
      if (escaped == 's') {
        absl::StrAppend(&out, in_class ? "" : "[", kWhiteSpace, in_class ? "" : "]");
      } else if (escaped == 'S' && !in_class) {
        absl::StrAppend(&out, "[^", kWhiteSpace, "]");
      } else {
        out += {c, escaped};
      }
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out += c;
  }
  return out;
}

std::string ErrorText(int code) {
  char text[256];
  pcre2_get_error_message(code, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof(text));
  return text;
}

using MatchData = std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)>;

}  // namespace

struct TokenizerSplit::Regex {
  std::string pattern;
  std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)> code{nullptr, pcre2_code_free};

  // One match at or after `from`: true and its bounds, or false. A JIT stack that is too small is
  // tried again without JIT, which keeps its stack on the heap.
  absl::StatusOr<bool> Next(absl::string_view text, size_t from, pcre2_match_data* data,
                            size_t& begin, size_t& end) const {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    int found =
        pcre2_match(code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK, data, nullptr);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      found = pcre2_match(code.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                          data, nullptr);
    }
    if (found == PCRE2_ERROR_NOMATCH) return false;
    if (found < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("tokenizer: pattern ", pattern, ": ", ErrorText(found)));
    }
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data);
    begin = bounds[0];
    end = bounds[1];
    return true;
  }

  absl::Status Split(absl::string_view text, pcre2_match_data* data,
                     std::vector<absl::string_view>& words) const {
    size_t cut = 0, from = 0;
    while (from < text.size()) {
      size_t begin = 0, end = 0;
      KVT_ASSIGN_OR_RETURN(const bool found, Next(text, from, data, begin, end));
      if (!found) break;
      if (end <= begin) {  // an empty match isolates nothing: on to the next character
        from = begin + 1;
        while (from < text.size() && (text[from] & 0xC0) == 0x80) ++from;
        continue;
      }
      if (begin > cut) words.push_back(text.substr(cut, begin - cut));
      words.push_back(text.substr(begin, end - begin));
      cut = from = end;
    }
    if (cut < text.size()) words.push_back(text.substr(cut));
    return absl::OkStatus();
  }
};

TokenizerSplit::TokenizerSplit(std::vector<std::unique_ptr<Regex>> steps)
    : steps_(std::move(steps)) {}
TokenizerSplit::TokenizerSplit(TokenizerSplit&&) noexcept = default;
TokenizerSplit& TokenizerSplit::operator=(TokenizerSplit&&) noexcept = default;
TokenizerSplit::~TokenizerSplit() = default;

absl::StatusOr<TokenizerSplit> TokenizerSplit::Create(const std::vector<std::string>& patterns) {
  std::vector<std::unique_ptr<Regex>> steps;
  for (const std::string& pattern : patterns) {
    const std::string translated = WithWhiteSpace(pattern);
    int error = 0;
    PCRE2_SIZE at = 0;
    auto step = std::make_unique<Regex>();
    step->pattern = pattern;
    step->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()),
                                   translated.size(), PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr));
    if (step->code == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("pattern ", pattern, ": ", ErrorText(error)));
    }
    // Without JIT (some platforms) matching is slower, not different.
    pcre2_jit_compile(step->code.get(), PCRE2_JIT_COMPLETE);
    steps.push_back(std::move(step));
  }
  return TokenizerSplit(std::move(steps));
}

absl::Status TokenizerSplit::Split(absl::string_view text,
                                   std::vector<absl::string_view>& words) const {
  if (text.empty()) return absl::OkStatus();
  const MatchData data(pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  KVT_CHECK(data != nullptr);
  std::vector<absl::string_view> pieces = {text}, next;
  for (size_t i = 0; i < steps_.size(); ++i) {
    next.clear();
    for (const absl::string_view piece : pieces) {
      KVT_RETURN_IF_ERROR(steps_[i]->Split(piece, data.get(), next));
    }
    pieces.swap(next);
  }
  words.insert(words.end(), pieces.begin(), pieces.end());
  return absl::OkStatus();
}

}  // namespace kvt
