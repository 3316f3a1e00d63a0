// ScoreBlockFn over an Arch (a vector of 16 f32, one lane a token). Included by select_isa_*.cc only.
//
// A block is head_dim codes of 16 tokens. Each row of 16 bytes is widened once and multiplied into
// the sums of all queries: per block head_dim x (2 or 3 conversions + queries FMA), from L1 or a
// stream of digests of head_dim x bits x 2 bytes.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/select_task.h"

namespace kvt {
namespace {

inline __m128i DigestRow(const uint8_t* digest, int row) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(digest + row * kBlockTokens));
}
// Bits [shift, shift + width) of every byte.
inline __m128i ByteField(__m128i bytes, int shift, int width) {
  return _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi32_si128(shift)),
                       _mm_set1_epi8(static_cast<char>((1 << width) - 1)));
}

template <typename Arch, int kQueries>
inline void AddChannel(typename Arch::V (&sums)[kQueries], const ScoreTask& task, int channel,
                       __m128i codes) {
  const typename Arch::V key = Arch::FromBytes(codes);
  for (int i = 0; i < kQueries; ++i) {
    sums[i] = Arch::Fma(Arch::Set(task.q[i * task.head_dim + channel]), key, sums[i]);
  }
}

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87.
template <typename Arch>
inline typename Arch::V ExpNegative(typename Arch::V x) {
  // 2^f on [-0.5, 0.5] is 1 + f (c0 + f (c1 + ...)), minimax.
  constexpr float kExp2[] = {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                             9.618436918e-03f, 1.339887502e-03f, 1.535336196e-04f};
  const typename Arch::V z = Arch::Mul(x, Arch::Set(1.44269504f));
  const typename Arch::V n = Arch::Round(z);
  const typename Arch::V f = Arch::Sub(z, n);
  typename Arch::V p = Arch::Set(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = Arch::Fma(p, f, Arch::Set(kExp2[i]));
  p = Arch::Fma(p, f, Arch::Set(1.0f));
  return Arch::ScaleOrZero(p, n, x, -87.0f);
}

template <typename Arch, int kQueries>
inline void ScoreQueries(const ScoreTask& task, const uint8_t* digest, BlockPart* parts,
                         int stride) {
  typename Arch::V even[kQueries], odd[kQueries];
  for (int i = 0; i < kQueries; ++i) even[i] = odd[i] = Arch::Set(0.0f);
  const int dim = task.head_dim;
  if (task.bits == 4) {
    for (int row = 0; row < dim / 2; ++row) {
      const __m128i bytes = DigestRow(digest, row);
      AddChannel<Arch, kQueries>(even, task, 2 * row, ByteField(bytes, 0, 4));
      AddChannel<Arch, kQueries>(odd, task, 2 * row + 1, ByteField(bytes, 4, 4));
    }
  } else {
    for (int d = 0; d < dim; d += 2) {
      __m128i a = ByteField(DigestRow(digest, d / 4), 2 * (d % 4), 2);
      __m128i b = ByteField(DigestRow(digest, d / 4), 2 * (d % 4) + 2, 2);
      if (task.bits == 3) {
        const __m128i high = DigestRow(digest, dim / 4 + d / 8);
        a = _mm_or_si128(a, _mm_slli_epi16(ByteField(high, d % 8, 1), 2));
        b = _mm_or_si128(b, _mm_slli_epi16(ByteField(high, d % 8 + 1, 1), 2));
      }
      AddChannel<Arch, kQueries>(even, task, d, a);
      AddChannel<Arch, kQueries>(odd, task, d + 1, b);
    }
  }
  for (int i = 0; i < kQueries; ++i) {
    const typename Arch::V logits = Arch::Add(even[i], odd[i]);
    const float max = Arch::ReduceMax(logits);
    const float sum = Arch::ReduceAdd(ExpNegative<Arch>(Arch::Sub(logits, Arch::Set(max))));
    parts[i * stride] = {max, sum};
  }
}

template <typename Arch>
void ScoreBlock(const ScoreTask& task, const uint8_t* digest, BlockPart* parts, int stride) {
  static_assert(kScoreQueriesMax == 4);
  switch (task.queries) {
    case 1:
      return ScoreQueries<Arch, 1>(task, digest, parts, stride);
    case 2:
      return ScoreQueries<Arch, 2>(task, digest, parts, stride);
    case 3:
      return ScoreQueries<Arch, 3>(task, digest, parts, stride);
    default:
      return ScoreQueries<Arch, 4>(task, digest, parts, stride);
  }
}

template <typename Arch>
void CombineParts(const BlockPart* parts, int blocks, int queries, float* scores) {
  constexpr int kLanes = kBlockTokens;
  float max = -INFINITY;
  for (int b = 0; b < blocks; ++b) max = std::max(max, parts[b].max);
  alignas(64) float below[kLanes], sums[kLanes];
  float sum = 0;
  // Twice the same: first what all blocks sum to, then each one's share of it.
  for (const bool share : {false, true}) {
    const float weight = share ? 1.0f / (sum * static_cast<float>(queries)) : 0.0f;
    for (int first = 0; first < blocks; first += kLanes) {
      const int count = std::min(kLanes, blocks - first);
      for (int i = 0; i < kLanes; ++i) {
        below[i] = i < count ? parts[first + i].max - max : -1000.0f;
        sums[i] = i < count ? parts[first + i].sum : 0.0f;
      }
      const typename Arch::V mass = Arch::Mul(ExpNegative<Arch>(Arch::Load(below)), Arch::Load(sums));
      if (!share) {
        sum += Arch::ReduceAdd(mass);
      } else {
        Arch::Store(below, Arch::Mul(mass, Arch::Set(weight)));
        for (int i = 0; i < count; ++i) scores[first + i] += below[i];
      }
    }
  }
}

}  // namespace
}  // namespace kvt
