#include "kernels/select/attention_stats.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "kernels/base/check.h"
#include "kernels/base/limits.h"

namespace kvt {
namespace {

constexpr int kExcessTokens = 16;
// A row that lost everything counts as this much, so that the mean stays finite.
constexpr double kMassMin = 1e-6;

}  // namespace

HeadStats MeasureHead(absl::Span<const float> p, int queries) {
  KVT_CHECK(queries > 0 && p.size() % static_cast<size_t>(queries) == 0, "queries=", queries);
  const size_t tokens = p.size() / static_cast<size_t>(queries);
  std::vector<double> mean(tokens);
  for (size_t i = 0; i < p.size(); ++i) mean[i % tokens] += double{p[i]} / queries;
  HeadStats stats;
  std::vector<double> excess(tokens);
  const auto top = static_cast<ptrdiff_t>(std::min<size_t>(kExcessTokens, tokens));
  for (int q = 0; q < queries; ++q) {
    const float* row = p.data() + static_cast<size_t>(q) * tokens;
    for (size_t j = 0; j < tokens; ++j) {
      excess[j] = row[j] - mean[j];
      stats.middle_mass += double{row[j]} / queries;
    }
    std::partial_sort(excess.begin(), excess.begin() + top, excess.end(), std::greater<>());
    for (ptrdiff_t i = 0; i < top; ++i) stats.top16_excess += excess[static_cast<size_t>(i)] / queries;
  }
  return stats;
}

void Captured::Add(double row_mass) {
  mass += row_mass;
  kl -= std::log(std::max(row_mass, kMassMin));
  ++rows;
}

void Captured::Add(const Captured& other) {
  mass += other.mass;
  kl += other.kl;
  rows += other.rows;
}

Captured Captured::Mean() const {
  if (rows == 0) return {};
  return {mass / rows, kl / rows, rows};
}

std::vector<int32_t> TopBlocks(absl::Span<const float> scores, int count) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto kept = static_cast<ptrdiff_t>(std::min(scores.size(), static_cast<size_t>(count)));
  std::nth_element(order.begin(), order.begin() + kept, order.end(), [&](int32_t a, int32_t b) {
    const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  order.resize(static_cast<size_t>(kept));
  std::sort(order.begin(), order.end());
  return order;
}

MiddleBlocks MiddleOf(int position) {
  const int first_recent = std::max(0, position + 1 - kRecentTokens) / kBlockTokens;
  const int first = kSinkTokens / kBlockTokens;
  return {first, std::max(first, first_recent)};
}

int SelectedBlocks(int budget_tokens, int position) {
  const MiddleBlocks middle = MiddleOf(position);
  const int fixed = std::min(kSinkTokens, position + 1) +
                    std::max(0, position + 1 - middle.end * kBlockTokens);
  return std::clamp((budget_tokens - fixed) / kBlockTokens, 0, middle.count());
}

}  // namespace kvt
