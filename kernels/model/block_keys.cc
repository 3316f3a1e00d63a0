#include "kernels/model/block_keys.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"

namespace kvt {

void BlockKeys::Load(const TextRun& run, int layer, int kv_head, int first, int end) {
  const Geometry& geometry = run.cache().geometry();
  head_dim_ = geometry.head_dim;
  keys_.resize(static_cast<size_t>(end) * static_cast<size_t>(BlockValues()));
  const size_t slice = static_cast<size_t>(kv_head) * geometry.SliceBytes();
  for (int b = first; b < end; ++b) {
    const SlotPair pair = run.Table(layer)[b];
    const uint8_t* base = run.cache().SlotAddress(pair.base) + slice;
    const uint8_t* residual = run.cache().SlotAddress(pair.residual) + slice;
    float* out = keys_.data() + static_cast<ptrdiff_t>(b) * BlockValues();
    for (int d = 0; d < head_dim_; ++d) {
      for (int t = 0; t < kBlockTokens; ++t) {
        const uint32_t at = KOffset(t, d);
        out[d * kBlockTokens + t] = HalfToFloat(JoinTarget(base[at], residual[at]));
      }
    }
  }
}

void BlockKeys::Logits(const float* q, float scale, int first_block,
                       absl::Span<float> logits) const {
  const int tokens = static_cast<int>(logits.size());
  KVT_CHECK(first_block * kBlockTokens + tokens <= blocks() * kBlockTokens, "tokens=", tokens);
  for (int at = 0; at < tokens; at += kBlockTokens) {
    const float* key = keys_.data() +
                       static_cast<ptrdiff_t>(first_block + at / kBlockTokens) * BlockValues();
    float sums[kBlockTokens] = {};
    for (int d = 0; d < head_dim_; ++d) {
      const float x = q[d];
      for (int t = 0; t < kBlockTokens; ++t) sums[t] += x * key[d * kBlockTokens + t];
    }
    for (int t = 0; t < std::min(kBlockTokens, tokens - at); ++t) {
      logits[static_cast<size_t>(at + t)] = sums[t] * scale;
    }
  }
}

void Softmax(absl::Span<float> values) {
  const float max = *std::max_element(values.begin(), values.end());
  double sum = 0;
  for (float& x : values) {
    x = std::exp(x - max);
    sum += x;
  }
  const float inverse = static_cast<float>(1 / sum);
  for (float& x : values) x *= inverse;
}

void LogSoftmax(absl::Span<float> values) {
  const float max = *std::max_element(values.begin(), values.end());
  double sum = 0;
  for (const float x : values) sum += std::exp(x - max);
  const float log = max + static_cast<float>(std::log(sum));
  for (float& x : values) x -= log;
}

}  // namespace kvt
