#include "prefill_worker/fetch_plan.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_format.h"

namespace kvt {
namespace {

// Fetching has to lose by so much before what is stored is computed: measurements are noisy, and
// computing takes the processor from others.
constexpr double kMargin = 1.1;

double FetchSeconds(const FetchSource& source) {
  return source.bytes_per_s > 0 ? static_cast<double>(source.bytes) / source.bytes_per_s : 0;
}

}  // namespace

FetchDecision DecideFetch(absl::Span<const FetchSource> sources, double prefill_tokens_per_s) {
  FetchDecision decision;
  decision.fetch.assign(sources.size(), true);
  if (sources.empty() || prefill_tokens_per_s <= 0) return decision;
  std::vector<size_t> order(sources.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return FetchSeconds(sources[a]) < FetchSeconds(sources[b]);
  });
  // Fetch the first `fetched` of the order, compute the rest; sources without a rate come first.
  const auto unknown = static_cast<size_t>(
      std::count_if(sources.begin(), sources.end(),
                    [](const FetchSource& source) { return source.bytes_per_s <= 0; }));
  double compute = 0;
  size_t best = order.size();
  double best_seconds = FetchSeconds(sources[order.back()]);
  for (size_t fetched = order.size(); fetched > unknown; --fetched) {
    compute += static_cast<double>(sources[order[fetched - 1]].tokens) / prefill_tokens_per_s;
    const double fetch = fetched > 1 ? FetchSeconds(sources[order[fetched - 2]]) : 0;
    if ((fetch + compute) * kMargin >= best_seconds) continue;
    best = fetched - 1;
    best_seconds = fetch + compute;
  }
  for (size_t k = best; k < order.size(); ++k) {
    const FetchSource& source = sources[order[k]];
    decision.fetch[order[k]] = false;
    decision.declined_tokens += source.tokens;
    absl::StrAppendFormat(
        &decision.declined, "%s%s of %s: %.1f ms to fetch, %.1f ms to compute",
        decision.declined.empty() ? "" : "; ",
        source.medium == FetchMedium::kDisk ? "disk" : "memory", source.store,
        1e3 * FetchSeconds(source),
        1e3 * static_cast<double>(source.tokens) / prefill_tokens_per_s);
  }
  return decision;
}

}  // namespace kvt
