#include "kernels/model/tokenizer_bpe.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {

absl::StatusOr<TokenizerBpe> TokenizerBpe::Create(const std::vector<std::string>& token_bytes,
                                                  const std::vector<BpeMerge>& merges,
                                                  bool whole_words) {
  TokenizerBpe bpe;
  absl::flat_hash_map<std::string, int32_t> ids;
  ids.reserve(token_bytes.size());
  bpe.byte_ids_.fill(-1);
  for (size_t i = 0; i < token_bytes.size(); ++i) {
    const std::string& bytes = token_bytes[i];
    if (bytes.empty()) continue;
    ids.try_emplace(bytes, static_cast<int32_t>(i));
    if (bytes.size() == 1) bpe.byte_ids_[static_cast<uint8_t>(bytes[0])] = static_cast<int32_t>(i);
  }
  bpe.merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const auto merged = ids.find(token_bytes[left] + token_bytes[right]);
    if (merged == ids.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "merges[", rank, "]: \"", absl::CHexEscape(token_bytes[left] + token_bytes[right]),
          "\" is not in vocab"));
    }
    // Of a pair that stands twice the last counts, as in the tokenizers library.
    bpe.merges_[PairKey(left, right)] = {static_cast<uint32_t>(rank), merged->second};
  }
  if (whole_words) bpe.whole_words_ = std::move(ids);
  return bpe;
}

void TokenizerBpe::PushPair(Scratch& scratch, int32_t left) const {
  if (left < 0) return;
  const Scratch::Symbol& symbol = scratch.symbols[left];
  if (symbol.next < 0) return;
  const int32_t right_id = scratch.symbols[symbol.next].id;
  const auto it = merges_.find(PairKey(symbol.id, right_id));
  if (it == merges_.end()) return;
  scratch.heap.push_back({it->second.rank, left, symbol.id, right_id, it->second.id});
  std::push_heap(scratch.heap.begin(), scratch.heap.end());
}

void TokenizerBpe::Encode(absl::string_view word, Scratch& scratch,
                          std::vector<int32_t>& ids) const {
  if (word.empty()) return;
  if (const auto it = whole_words_.find(word); it != whole_words_.end()) {
    ids.push_back(it->second);
    return;
  }
  auto& symbols = scratch.symbols;
  symbols.clear();
  scratch.heap.clear();
  for (const char byte : word) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(byte)];
    if (id < 0) continue;
    const auto i = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, i - 1, i + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;
  const auto count = static_cast<int32_t>(symbols.size());
  for (int32_t i = 0; i < count; ++i) PushPair(scratch, i);
  while (!scratch.heap.empty()) {
    std::pop_heap(scratch.heap.begin(), scratch.heap.end());
    const Scratch::Pair pair = scratch.heap.back();
    scratch.heap.pop_back();
    Scratch::Symbol& left = symbols[pair.left];
    // A merged-away symbol has id -1; a pair whose symbols changed since is stale.
    if (left.id != pair.left_id || left.next < 0 || symbols[left.next].id != pair.right_id)
      continue;
    Scratch::Symbol& right = symbols[left.next];
    right.id = -1;
    left.id = pair.merged_id;
    left.next = right.next;
    if (left.next >= 0) symbols[left.next].previous = pair.left;
    PushPair(scratch, left.previous);
    PushPair(scratch, pair.left);
  }
  for (int32_t i = 0; i >= 0; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace kvt
