// How a token is chosen from logits. Counter-based: the choice is a function of the logits, the
// parameters and the position alone (DESIGN 2.5), so it does not depend on batch or restart.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace kvt {

// A NaN among the logits: the sequence is broken and its request fails.
inline constexpr int32_t kTokenInvalid = -1;
// Candidates that top-k keeps at most; without top-k, top-p looks at this many of the likeliest.
inline constexpr int kTopKMax = 1024;

struct SampleParams {
  float temperature = 0;   // 0: greedy (lowest id among equals); else in (0, 100]
  int32_t top_k = 0;       // 0: off; else in [1, kTopKMax]
  float top_p = 1;         // (0, 1]
  uint32_t reserved = 0;
  uint64_t seed = 0;
  uint64_t position = 0;   // of the token being chosen

  // InvalidArgument naming the field.
  [[nodiscard]] absl::Status Validate() const;
};

}  // namespace kvt
