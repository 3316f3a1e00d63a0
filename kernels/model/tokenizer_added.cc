#include "kernels/model/tokenizer_added.h"

#include "kernels/base/check.h"

namespace kvt {

void TokenizerAdded::Add(absl::string_view content, int32_t id, bool is_special) {
  KVT_CHECK(!content.empty());
  begins_[static_cast<uint8_t>(content[0])] = true;
  uint32_t node = 0;
  for (const char c : content) {
    const uint32_t edge = node << 8 | static_cast<uint8_t>(c);
    const auto [it, is_new] = edges_.try_emplace(edge, static_cast<uint32_t>(ends_.size()));
    if (is_new) ends_.emplace_back();
    node = it->second;
  }
  ends_[node] = {id, is_special};
}

TokenizerAdded::Match TokenizerAdded::LongestAt(absl::string_view text,
                                                SpecialTokens special) const {
  Match longest;
  uint32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto it = edges_.find(node << 8 | static_cast<uint8_t>(text[i]));
    if (it == edges_.end()) break;
    node = it->second;
    const End& end = ends_[node];
    const bool usable = end.id >= 0 && (special == SpecialTokens::kParse || !end.is_special);
    if (usable) longest = {i + 1, end.id};
  }
  return longest;
}

absl::Status TokenizerAdded::Cut(absl::string_view text, SpecialTokens special,
                                 absl::FunctionRef<absl::Status(absl::string_view)> on_text,
                                 absl::FunctionRef<void(int32_t)> on_token) const {
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    Match match;
    if (begins_[static_cast<uint8_t>(text[at])]) match = LongestAt(text.substr(at), special);
    if (match.bytes == 0) {
      ++at;
      continue;
    }
    KVT_RETURN_IF_ERROR(on_text(text.substr(begin, at - begin)));
    on_token(match.id);
    at += match.bytes;
    begin = at;
  }
  return on_text(text.substr(begin));
}

}  // namespace kvt
