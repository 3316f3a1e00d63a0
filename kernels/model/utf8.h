// UTF-8 as RFC 3629 has it: no surrogates, nothing beyond U+10FFFF, no overlong forms.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace kvt {

// Bytes of the longest valid prefix; text.size() when all of it is valid.
[[nodiscard]] size_t ValidUtf8Prefix(absl::string_view text);

// Turns bytes that come in pieces into valid UTF-8 text. A sequence cut by the end of a piece is
// held back (3 bytes at most) until the next one completes it. Each maximal part of a broken
// sequence becomes one U+FFFD, as String::from_utf8_lossy does it. One owner; not thread-safe.
class Utf8Stream {
 public:
  // The text that is complete now. The concatenation of all results, with Finish, does not depend
  // on how the bytes were cut.
  [[nodiscard]] std::string Append(absl::string_view bytes);
  // U+FFFD for a sequence that never became complete, else nothing. The stream starts anew.
  [[nodiscard]] std::string Finish();

 private:
  std::string held_;
};

}  // namespace kvt
