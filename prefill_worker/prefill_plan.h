// What a prefill job still has to compute: ranges of tokens over the KV that exists. PURE.
//
// A job is a sequence of tokens of which some blocks lie in the tier (a prefix, or all but holes
// where a store was lost). The others are computed in chunks: in order of position, because a
// position attends to all before it; a chunk starts at a block's start and ends at a block's end or
// at the sequence's. The last block is always computed: reuse stops at floor((tokens - 1) / 16)
// blocks, so that there are logits to sample from.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/base/limits.h"

namespace kvt {

struct TokenRange {
  int begin = 0;
  int end = 0;  // exclusive
  [[nodiscard]] int size() const { return end - begin; }
  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

class PrefillPlan {
 public:
  // `tokens` > 0; nothing is present yet.
  explicit PrefillPlan(int tokens);

  [[nodiscard]] int tokens() const { return tokens_; }
  // Blocks with the partial tail, if there is one.
  [[nodiscard]] int blocks() const { return static_cast<int>(present_.size()); }
  [[nodiscard]] int reusable_blocks() const { return (tokens_ - 1) / kBlockTokens; }

  // Says whether a reusable block lies in the tier. Only before the first chunk is taken.
  void SetPresent(int block, bool present);
  [[nodiscard]] bool IsPresent(int block) const { return present_[static_cast<size_t>(block)]; }
  [[nodiscard]] std::vector<int> MissingBlocks() const;
  // Maximal runs of tokens that are not present, in order.
  [[nodiscard]] std::vector<TokenRange> MissingRanges() const;
  // Tokens that are to be computed in all, and that are not present yet.
  [[nodiscard]] int computed_tokens_total() const;
  [[nodiscard]] int remaining_tokens() const;

  // Takes the next chunk of at most `tokens_max` tokens; none when less than a block fits and the
  // rest of the range is longer, or when everything has been taken.
  [[nodiscard]] std::optional<TokenRange> TakeChunk(int tokens_max);
  [[nodiscard]] bool AllTaken() const { return next_ >= tokens_; }
  // Tokens whose KV exists or has been taken: what the sequence's progress shows.
  [[nodiscard]] int tokens_done() const { return tokens_ - remaining_tokens(); }

 private:
  void SkipPresent();

  int tokens_;
  int next_ = 0;  // first token not present and not taken
  bool started_ = false;
  std::vector<bool> present_;
};

}  // namespace kvt
