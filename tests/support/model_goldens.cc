#include "tests/support/model_goldens.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

constexpr size_t kTopTokens = 8;

// Takes values from the front; `ok` turns false when there are too few bytes.
struct Reader {
  absl::string_view rest;
  bool ok = true;

  template <typename T>
  std::vector<T> Take(size_t count) {
    if (!ok || rest.size() / sizeof(T) < count) {
      ok = false;
      return std::vector<T>();
    }
    std::vector<T> values(count);
    std::memcpy(values.data(), rest.data(), count * sizeof(T));
    rest.remove_prefix(count * sizeof(T));
    return values;
  }
  uint32_t Number() {
    const auto value = Take<uint32_t>(1);
    return value.empty() ? 0 : value[0];
  }
  GoldenTokens Tokens(bool is_dist) {
    GoldenTokens tokens;
    tokens.position = static_cast<int>(Number());
    const size_t count = is_dist ? Number() : kTopTokens;
    tokens.ids = Take<uint16_t>(count);
    tokens.log_probabilities = Take<float>(count);
    if (is_dist && ok) {
      const auto rest_value = Take<float>(1);
      if (ok) tokens.log_rest = rest_value[0];
    }
    return tokens;
  }
};

// The logarithm of the sum of exponentials, in f64.
double LogSumExp(absl::Span<const float> logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return largest + std::log(sum);
}

}  // namespace

absl::StatusOr<std::vector<GoldenPrompt>> ReadModelGoldens(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened"));
  std::stringstream buffer;
  buffer << in.rdbuf();
  const std::string content = buffer.str();
  Reader reader{content};
  if (!absl::ConsumePrefix(&reader.rest, "KVTGOLD1")) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": does not begin with KVTGOLD1"));
  }
  std::vector<GoldenPrompt> prompts;
  const uint32_t count = reader.Number();
  for (uint32_t i = 0; i < count && reader.ok; ++i) {
    GoldenPrompt prompt;
    const auto name = reader.Take<char>(reader.Number());
    prompt.name.assign(name.begin(), name.end());
    prompt.tokens = reader.Take<int32_t>(reader.Number());
    const uint32_t tops = reader.Number();
    for (uint32_t t = 0; t < tops && reader.ok; ++t) prompt.tops.push_back(reader.Tokens(false));
    const uint32_t dists = reader.Number();
    for (uint32_t d = 0; d < dists && reader.ok; ++d) prompt.dists.push_back(reader.Tokens(true));
    prompts.push_back(std::move(prompt));
  }
  if (!reader.ok || !reader.rest.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is cut, or has more than it says"));
  }
  return prompts;
}

void GoldenComparison::Add(int position, absl::Span<const float> logits) {
  const auto at_position = [&](const std::vector<GoldenTokens>& list) {
    const auto it = std::lower_bound(
        list.begin(), list.end(), position,
        [](const GoldenTokens& tokens, int wanted) { return tokens.position < wanted; });
    return it != list.end() && it->position == position ? &*it : nullptr;
  };
  const double log_sum = LogSumExp(logits);
  const GoldenTokens* top = at_position(prompt_.tops);
  KVT_CHECK(top != nullptr, prompt_.name, " has no golden for position ", position);
  ++positions_;
  for (size_t i = 0; i < top->ids.size(); ++i) {
    differences_.push_back(std::abs(logits[top->ids[i]] - log_sum - top->log_probabilities[i]));
  }
  const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
  if (best == top->ids[0]) ++same_top_;

  const GoldenTokens* dist = at_position(prompt_.dists);
  if (dist == nullptr) return;
  double kl = 0, ours_in_bins = 0;
  for (size_t i = 0; i < dist->ids.size(); ++i) {
    const double ours = logits[dist->ids[i]] - log_sum, theirs = dist->log_probabilities[i];
    kl += std::exp(theirs) * (theirs - ours);
    ours_in_bins += std::exp(ours);
  }
  const double rest = std::exp(dist->log_rest);
  // Rounding leaves a sum near 1 where the reference has (nearly) no rest.
  const double ours_rest = std::max(1 - ours_in_bins, 1e-12);
  if (rest > 1e-9) kl += rest * (dist->log_rest - std::log(ours_rest));
  kl_.push_back(kl);
}

double Mean(const std::vector<double>& values) {
  KVT_CHECK(!values.empty());
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double Quantile(std::vector<double> values, double fraction) {
  KVT_CHECK(!values.empty() && fraction > 0 && fraction <= 1);
  const auto rank = static_cast<size_t>(std::ceil(fraction * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + (rank - 1), values.end());
  return values[rank - 1];
}

}  // namespace kvt
