// Needles planted in a real text, the questions about them, and whether selection by digests still
// answers them: the check that calibration ends with (DESIGN 5).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/model/tokenizer.h"
#include "kernels/model/transformer.h"
#include "kernels/select/calibration.h"

namespace kvt {

struct Needle {
  std::string city;
  std::string number;
};

struct NeedleQuestion {
  std::vector<int32_t> tokens;  // question, then answer
  int answer = 0;               // of them, the answer's
};

struct NeedleText {
  std::vector<int32_t> prefix;  // exactly `tokens` of the haystack with its needles
  std::vector<NeedleQuestion> questions;
};

// `count` needles at even depths of a haystack's first tokens; with one, at `depth` in (0, 1). A function
// of its arguments alone. KVT_CHECKs that the haystack has so many tokens.
NeedleText PlantNeedles(const Tokenizer& tokenizer, const std::vector<int32_t>& haystack, int tokens,
                        int count, double depth, uint64_t seed);

struct NeedlesFound {
  int planted = 0;
  int full = 0;    // whose answers full attention gives, token by token the arg-max
  int sparse = 0;  // and those that it gives over sinks, recent and selected tokens
};

// Prefills the text densely and decodes each question twice, the sparse time with the calibration's
// selecting heads at `budget_tokens`. Errors as TextRun's.
absl::StatusOr<NeedlesFound> FindNeedles(const Transformer& transformer,
                                         const Calibration& calibration, const NeedleText& text,
                                         int budget_tokens);

}  // namespace kvt
