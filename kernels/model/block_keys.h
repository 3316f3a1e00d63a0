// The stored keys of one layer and KV head in f32, for exact attention weights in calibration and
// measurements. Not thread-safe while loading.
#pragma once

#include <vector>

#include "absl/types/span.h"
#include "kernels/model/text_run.h"

namespace kvt {

class BlockKeys {
 public:
  // Blocks [first, end) of the run; earlier ones stay as they are.
  void Load(const TextRun& run, int layer, int kv_head, int first, int end);

  [[nodiscard]] int blocks() const { return static_cast<int>(keys_.size()) / BlockValues(); }
  [[nodiscard]] int head_dim() const { return head_dim_; }
  // Key of a token, channel d at [d * kBlockTokens].
  [[nodiscard]] const float* Token(int block, int token) const {
    return keys_.data() + static_cast<ptrdiff_t>(block) * BlockValues() + token;
  }
  // logits[j] = scale * q . k(first_block * 16 + j) for j < logits.size().
  void Logits(const float* q, float scale, int first_block, absl::Span<float> logits) const;

 private:
  [[nodiscard]] int BlockValues() const { return kBlockTokens * head_dim_; }
  int head_dim_ = 1;
  std::vector<float> keys_;  // [block][channel][token]
};

// In place; the result sums to 1. Not empty.
void Softmax(absl::Span<float> values);
// Its logarithm.
void LogSoftmax(absl::Span<float> values);

}  // namespace kvt
