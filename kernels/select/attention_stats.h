// What calibration measures of attention (DESIGN 5): how much of a head's attention is concentrated
// and depends on the query, and how much of it a set of blocks captures. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvt {

// Of one query head, over queries spread through a text.
struct HeadStats {
  // Mean over the queries of the sum of the 16 largest p_q(j) - mean over queries of p(j), j in the
  // middle: retrieval, as against attention that every query pays (DESIGN 5, measured in FACTS).
  double top16_excess = 0;
  // Mean over the queries of the sum of p_q(j): what PulseInfer ranks by (arXiv 2609.34555).
  double middle_mass = 0;
};

// p is [queries][tokens]: attention weights over the middle (the softmax runs over all tokens, so a
// row sums to less than 1). queries > 0.
[[nodiscard]] HeadStats MeasureHead(absl::Span<const float> p, int queries);

// What blocks chosen for a row keep of its attention.
struct Captured {
  double mass = 0;  // mean of the weight inside the set, sinks and recent tokens included
  double kl = 0;    // mean of -log of it: KL of attention over the set from full attention
  int rows = 0;     // query heads x queries so far; the means are of sums until Mean()

  void Add(double row_mass);
  void Add(const Captured& other);
  [[nodiscard]] Captured Mean() const;
};

// Selected blocks of a budget: tokens of the whole set, of which sink and recent tokens come first;
// never negative. Budget counts tokens (FACTS: "sink and recent included").
[[nodiscard]] int SelectedBlocks(int budget_tokens, int position);

// The middle of a sequence whose last token is at `position`: blocks [first, end). Sinks are block
// 0; recent blocks are those that hold one of the last 128 tokens.
struct MiddleBlocks {
  int first = 0;
  int end = 0;
  [[nodiscard]] int count() const { return end - first; }
};
[[nodiscard]] MiddleBlocks MiddleOf(int position);

// Indices of the `count` largest scores (all, when there are fewer), ascending; of equal scores the
// lower index. Scores are numbers.
[[nodiscard]] std::vector<int32_t> TopBlocks(absl::Span<const float> scores, int count);

inline constexpr int kSinkTokens = 16;
inline constexpr int kRecentTokens = 128;

}  // namespace kvt
