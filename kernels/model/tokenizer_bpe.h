// Byte-pair merging of one word: of all neighbouring pairs that have a merge, the one of lowest
// rank is merged, the leftmost first, until none is left (Sennrich et al. 2016, as GPT-2 uses it on
// bytes). With a heap of pairs over a linked list: O(n log n) in the word's length.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvt {

struct BpeMerge {
  int32_t left = 0, right = 0;  // token ids; the place in the list is the rank
};

// Immutable, thread-safe.
class TokenizerBpe {
 public:
  // `token_bytes`: id -> bytes of the token, empty for ids that no word may become. `whole_words`:
  // a word that is a token is that token, without merging (ignore_merges). InvalidArgument: a merge
  // whose result is no token.
  static absl::StatusOr<TokenizerBpe> Create(const std::vector<std::string>& token_bytes,
                                             const std::vector<BpeMerge>& merges, bool whole_words);

  // Room that Encode works in; reused by one caller from word to word.
  struct Scratch;

  // Appends the ids of `word`. A byte without a token of its own is dropped before merging, as the
  // tokenizers library does without an unknown token (SmolLM2 lacks some control characters).
  void Encode(absl::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  struct Merged {
    uint32_t rank = 0;
    int32_t id = 0;
  };
  static uint64_t PairKey(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  void PushPair(Scratch& scratch, int32_t left) const;

  std::array<int32_t, 256> byte_ids_{};
  absl::flat_hash_map<uint64_t, Merged> merges_;
  absl::flat_hash_map<std::string, int32_t> whole_words_;  // empty unless asked for
};

struct TokenizerBpe::Scratch {
  struct Symbol {
    int32_t id;
    int32_t previous, next;  // -1: none
  };
  struct Pair {
    uint32_t rank;
    int32_t left;  // symbol
    int32_t left_id, right_id, merged_id;
    // For a heap whose front is the lowest rank, leftmost.
    friend bool operator<(const Pair& a, const Pair& b) {
      return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
    }
  };
  std::vector<Symbol> symbols;
  std::vector<Pair> heap;
};

}  // namespace kvt
