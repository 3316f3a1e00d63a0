// Reads the goldens of tests/support/goldens/make_model_goldens.py (the format stands there) and
// compares logits with them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvt {

// After tokens [0, position] of the prompt: the likeliest next tokens, likeliest first.
struct GoldenTokens {
  int position = 0;
  std::vector<uint16_t> ids;
  std::vector<float> log_probabilities;
  float log_rest = 0;  // of a dist: the probability of all other tokens
};

struct GoldenPrompt {
  std::string name;
  std::vector<int32_t> tokens;
  std::vector<GoldenTokens> tops;   // 8 tokens, every position
  std::vector<GoldenTokens> dists;  // up to 512 tokens
};

absl::StatusOr<std::vector<GoldenPrompt>> ReadModelGoldens(const std::string& path);

// What a comparison adds up. Feed it rows of logits [vocab] of positions in any order.
class GoldenComparison {
 public:
  explicit GoldenComparison(const GoldenPrompt& prompt) : prompt_(prompt) {}

  // `logits` of the prompt's `position`.
  void Add(int position, absl::Span<const float> logits);

  [[nodiscard]] int positions() const { return positions_; }
  // Over the dists' bins, of the reference relative to ours.
  [[nodiscard]] const std::vector<double>& kl() const { return kl_; }
  // Of all top-8 log-probabilities.
  [[nodiscard]] const std::vector<double>& top8_differences() const { return differences_; }
  [[nodiscard]] int same_top() const { return same_top_; }

 private:
  const GoldenPrompt& prompt_;
  int positions_ = 0;
  int same_top_ = 0;
  std::vector<double> kl_;
  std::vector<double> differences_;
};

[[nodiscard]] double Mean(const std::vector<double>& values);
// The value that `fraction` of them do not exceed. Not empty.
[[nodiscard]] double Quantile(std::vector<double> values, double fraction);

}  // namespace kvt
