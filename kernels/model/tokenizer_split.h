// Cuts text into the words that byte-level BPE works on: a sequence of regular expressions, each
// of which isolates its matches within the pieces that the one before left. PCRE2 with JIT, UTF and
// Unicode properties; it stays in tokenizer_split.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvt {

// Immutable, thread-safe.
class TokenizerSplit {
 public:
  // `patterns` as tokenizer.json has them, in the syntax of Oniguruma as far as the two agree; \s
  // and \S mean Unicode White_Space. InvalidArgument with the pattern and PCRE2's message.
  static absl::StatusOr<TokenizerSplit> Create(const std::vector<std::string>& patterns);

  TokenizerSplit(TokenizerSplit&&) noexcept;
  TokenizerSplit& operator=(TokenizerSplit&&) noexcept;
  ~TokenizerSplit();

  // Appends the words of `text`, which must be valid UTF-8; together they are the text. The views
  // point into it. ResourceExhausted when a pattern needs more backtracking than PCRE2's limit.
  absl::Status Split(absl::string_view text, std::vector<absl::string_view>& words) const;

 private:
  struct Regex;
  explicit TokenizerSplit(std::vector<std::unique_ptr<Regex>> steps);

  std::vector<std::unique_ptr<Regex>> steps_;
};

}  // namespace kvt
