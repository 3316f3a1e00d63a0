// The added tokens of a tokenizer.json: contents that are cut out of a text before it is split into
// words.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvt {

// What a special token (as <|im_end|>) that stands in the text becomes.
enum class SpecialTokens : uint8_t {
  kParse,   // its id: for text that a chat template made
  kAsText,  // the ids of its characters: for what a user wrote
};

// Immutable once filled, then thread-safe.
class TokenizerAdded {
 public:
  // `content` is not empty; the last one of equal contents counts.
  void Add(absl::string_view content, int32_t id, bool is_special);

  // Goes through `text` from its start: `on_token` for each content (the leftmost, of those the
  // longest), `on_text` for what stands between them, which may be empty. Ends with the first
  // error of `on_text`.
  absl::Status Cut(absl::string_view text, SpecialTokens special,
                   absl::FunctionRef<absl::Status(absl::string_view)> on_text,
                   absl::FunctionRef<void(int32_t)> on_token) const;

 private:
  struct End {
    int32_t id = -1;  // of the content that ends at the node, or -1
    bool is_special = false;
  };
  struct Match {
    size_t bytes = 0;  // 0: none
    int32_t id = -1;
  };
  Match LongestAt(absl::string_view text, SpecialTokens special) const;

  // A tree over bytes: node << 8 | byte -> next node.
  absl::flat_hash_map<uint32_t, uint32_t> edges_;
  std::vector<End> ends_ = std::vector<End>(1);  // by node
  std::array<bool, 256> begins_{};               // whether a content begins with the byte
};

}  // namespace kvt
