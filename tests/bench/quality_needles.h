// Needles planted in a real text, and the questions about them. A function of its arguments alone.
#pragma once

#include <string>
#include <vector>

#include "kernels/model/tokenizer.h"

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

// `count` needles at even depths of a haystack's first tokens; with one, at `depth` in (0, 1).
NeedleText PlantNeedles(const Tokenizer& tokenizer, const std::vector<int32_t>& haystack, int tokens,
                        int count, double depth, uint64_t seed);

}  // namespace kvt
