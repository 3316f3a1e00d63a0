#include "kernels/cpu/sample.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/base/random.h"

namespace kvt {
namespace {

// The largest logit, or NaN when any is NaN.
float MaxOrNan(const float* x, int n) {
  __m256 best = _mm256_set1_ps(-INFINITY);
  __m256 unordered = _mm256_setzero_ps();
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    best = _mm256_max_ps(best, v);
    unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  bool nan = _mm256_movemask_ps(unordered) != 0;
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, best);
  float max = -INFINITY;
  for (const float lane : lanes) max = std::max(max, lane);
  for (; i < n; ++i) {
    nan = nan || std::isnan(x[i]);
    max = std::max(max, x[i]);
  }
  return nan ? NAN : max;
}

int FirstEqual(const float* x, int n, float value) {
  const __m256 wanted = _mm256_set1_ps(value);
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const int mask =
        _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), wanted, _CMP_EQ_OQ));
    if (mask != 0) return i + __builtin_ctz(static_cast<unsigned>(mask));
  }
  for (; i < n; ++i) {
    if (x[i] == value) return i;
  }
  return n - 1;
}

// Draws from weights exp((logit - max) / temperature) over `count` candidates.
int32_t Draw(const float* logits, const int32_t* ids, int count, double total, float max,
             const SampleParams& params) {
  const double target = CounterUniform(params.seed, params.position) * total;
  double sum = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t id = ids != nullptr ? ids[i] : i;
    sum += std::exp((static_cast<double>(logits[id]) - max) / params.temperature);
    if (sum > target) return id;
  }
  return ids != nullptr ? ids[count - 1] : count - 1;
}

int32_t SampleRow(const float* logits, int vocabulary, const SampleParams& params, int32_t* ids) {
  const float max = MaxOrNan(logits, vocabulary);
  if (std::isnan(max)) return kTokenInvalid;
  if (params.temperature == 0 || params.top_k == 1 || std::isinf(max)) {
    return FirstEqual(logits, vocabulary, max);
  }
  const auto weight = [&](int32_t id) {
    return std::exp((static_cast<double>(logits[id]) - max) / params.temperature);
  };
  const bool cut_p = params.top_p < 1;
  double total = 0;
  if (params.top_k == 0) {
    for (int32_t id = 0; id < vocabulary; ++id) total += weight(id);
    if (!cut_p) return Draw(logits, nullptr, vocabulary, total, max, params);
  }
  int count = std::min(vocabulary, params.top_k == 0 ? kTopKMax : params.top_k);
  for (int32_t id = 0; id < vocabulary; ++id) ids[id] = id;
  const auto likelier = [logits](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  if (count < vocabulary) std::nth_element(ids, ids + count, ids + vocabulary, likelier);
  std::sort(ids, ids + count, likelier);
  if (params.top_k != 0) {
    for (int i = 0; i < count; ++i) total += weight(ids[i]);
  }
  double kept = 0;
  int prefix = 0;
  while (prefix < count && (prefix == 0 || kept < params.top_p * total)) {
    kept += weight(ids[prefix++]);
  }
  return Draw(logits, ids, prefix, kept, max, params);
}

}  // namespace

size_t CpuSampleWorkspaceBytes(int rows, int vocabulary) {
  return static_cast<size_t>(rows) * static_cast<size_t>(vocabulary) * sizeof(int32_t);
}

void CpuSample(const SampleArgs& args, TeamMember& member) {
  const TeamMember::Range rows = member.Share(args.rows);
  for (int r = rows.begin; r < rows.end; ++r) {
    const size_t at = static_cast<size_t>(r) * static_cast<size_t>(args.vocabulary);
    args.out[r] = SampleRow(args.logits + at, args.vocabulary, args.params[r],
                            static_cast<int32_t*>(args.workspace) + at);
  }
}

}  // namespace kvt
