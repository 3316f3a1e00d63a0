// ScoreIsa over an Arch: V (16 f32) as in attention_impl.h, I (16 int32) and B (64 bytes). Included by
// select_isa_*.cc only.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/select_task.h"

namespace kvt {
namespace {

// Digests come from memory, once a step: asked for so many blocks before they are scored (a page or
// two, more than the processor's own prefetching looks across).
constexpr int kBlocksAhead = 16;

// exp2(x) is 0 below: results stay normal numbers.
constexpr float kExponentLeast = -125.0f;

// 2^x for x <= 0, relative error below 2e-7.
template <typename Arch>
inline typename Arch::V Exp2Negative(typename Arch::V x) {
  // 2^f on [-0.5, 0.5] is 1 + f (c0 + f (c1 + ...)), minimax.
  constexpr float kExp2[] = {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                             9.618436918e-03f, 1.339887502e-03f, 1.535336196e-04f};
  const typename Arch::V n = Arch::Round(x);
  const typename Arch::V f = Arch::Sub(x, n);
  typename Arch::V p = Arch::Set(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = Arch::Fma(p, f, Arch::Set(kExp2[i]));
  p = Arch::Fma(p, f, Arch::Set(1.0f));
  return Arch::ScaleOrZero(p, n, x, kExponentLeast);
}

// Adds to the sums the products of one row that holds 8 / kWidth groups of four channels; `q` is at
// the row's first channel.
template <typename Arch, int kWidth, int kQueries>
inline void AddRow(typename Arch::I (&sums)[kQueries], const uint8_t* row, const int8_t* q,
                   int head_dim) {
  const typename Arch::B bytes = Arch::LoadBytes(row);
#pragma GCC unroll 4
  for (int pair = 0; pair < 4 / kWidth; ++pair) {
    const typename Arch::B a = Arch::template Field<kWidth>(bytes, 2 * pair * kWidth);
    const typename Arch::B b = Arch::template Field<kWidth>(bytes, (2 * pair + 1) * kWidth);
    for (int i = 0; i < kQueries; ++i) {
      sums[i] = Arch::DotPair(sums[i], a, b, q + i * head_dim + 8 * pair);
    }
  }
}

template <typename Arch, int kBits, int kQueries>
inline void BlockLogits(const uint8_t* digest, const int8_t* q, int head_dim, int32_t* logits) {
  constexpr int kLow = kBits == 4 ? 4 : 2;
  constexpr int kRowChannels = 32 / kLow;
  typename Arch::I sums[kQueries];
  for (int i = 0; i < kQueries; ++i) sums[i] = Arch::ZeroInt();
  for (int d = 0; d < head_dim; d += kRowChannels, digest += kDigestRowBytes) {
    AddRow<Arch, kLow>(sums, digest, q + d, head_dim);
  }
  if constexpr (kBits == 3) {
    typename Arch::I high[kQueries];
    for (int i = 0; i < kQueries; ++i) high[i] = Arch::ZeroInt();
    for (int d = 0; d < head_dim; d += 32, digest += kDigestRowBytes) {
      AddRow<Arch, 1>(high, digest, q + d, head_dim);
    }
    for (int i = 0; i < kQueries; ++i) sums[i] = Arch::AddTimes4(sums[i], high[i]);
  }
  for (int i = 0; i < kQueries; ++i) {
    Arch::StoreInt(logits + i * kScoreBurstBlocks * kBlockTokens, sums[i]);
  }
}

inline const uint8_t* BlockDigest(const ScoreTask& task, int block) {
  const uint32_t entry = task.entries == nullptr ? task.first_entry + static_cast<uint32_t>(block)
                                                 : task.entries[block];
  return task.digests + size_t{entry} * task.stride;
}

inline void Prefetch(const uint8_t* digest, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes; at += kDigestRowBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(digest + at), _MM_HINT_T0);
  }
}

template <typename Arch, int kBits, int kQueries>
inline void QueriesLogits(const ScoreTask& task, int first, int burst, int32_t* logits) {
  const int8_t* q = task.q + first * task.head_dim;
  const int begin = burst * kScoreBurstBlocks;
  const int end = std::min(begin + kScoreBurstBlocks, task.blocks);
  for (int b = begin; b < end; ++b, logits += kBlockTokens) {
    if (first == 0 && b + kBlocksAhead < task.blocks) {
      Prefetch(BlockDigest(task, b + kBlocksAhead), DigestHeadBytes(task.head_dim, kBits));
    }
    BlockLogits<Arch, kBits, kQueries>(BlockDigest(task, b), q, task.head_dim, logits);
  }
}

template <typename Arch, int kBits>
inline void BitsLogits(const ScoreTask& task, int first, int count, int burst, int32_t* logits) {
  static_assert(kScoreQueriesMax == 4);
  switch (count) {
    case 1:
      return QueriesLogits<Arch, kBits, 1>(task, first, burst, logits);
    case 2:
      return QueriesLogits<Arch, kBits, 2>(task, first, burst, logits);
    case 3:
      return QueriesLogits<Arch, kBits, 3>(task, first, burst, logits);
    default:
      return QueriesLogits<Arch, kBits, 4>(task, first, burst, logits);
  }
}

template <typename Arch>
void Logits(const ScoreTask& task, int first, int count, int burst, int32_t* logits) {
  switch (task.bits) {
    case 2:
      return BitsLogits<Arch, 2>(task, first, count, burst, logits);
    case 3:
      return BitsLogits<Arch, 3>(task, first, count, burst, logits);
    default:
      return BitsLogits<Arch, 4>(task, first, count, burst, logits);
  }
}

// The largest logit of a burst and each block's sum of exponentials.
template <typename Arch>
inline void Weigh(const int32_t* logits, int blocks, float step2, int32_t* max, float* sums) {
  typename Arch::I most = Arch::LoadInt(logits);
  for (int b = 1; b < blocks; ++b) {
    most = Arch::MaxInt(most, Arch::LoadInt(logits + b * kBlockTokens));
  }
  *max = Arch::ReduceMaxInt(most);
  most = Arch::SetInt(*max);
  const typename Arch::V step = Arch::Set(step2);
  const auto weight = [&](int b) {
    const typename Arch::I below = Arch::SubInt(Arch::LoadInt(logits + b * kBlockTokens), most);
    return Exp2Negative<Arch>(Arch::Mul(Arch::ToFloat(below), step));
  };
  typename Arch::Sums4 quads[kScoreBurstBlocks / 4];
  for (int i = 0; i < kScoreBurstBlocks / 4; ++i) {
    quads[i] = Arch::Sum4(weight(4 * i), weight(4 * i + 1), weight(4 * i + 2), weight(4 * i + 3));
  }
  const typename Arch::V all = Arch::Sum16(quads[0], quads[1], quads[2], quads[3]);
  Arch::Store(sums, Arch::Select(blocks, all, Arch::Set(0.0f)));
}

template <typename Arch>
void Score(const ScoreTask& task, int begin, int end) {
  alignas(64) int32_t logits[kScoreQueriesMax * kScoreBurstBlocks * kBlockTokens] = {};
  for (int burst = begin; burst < end; ++burst) {
    const int blocks = std::min(kScoreBurstBlocks, task.blocks - burst * kScoreBurstBlocks);
    for (int first = 0; first < task.queries; first += kScoreQueriesMax) {
      const int count = std::min(kScoreQueriesMax, task.queries - first);
      Logits<Arch>(task, first, count, burst, logits);
      for (int i = 0; i < count; ++i) {
        const QueryParts& parts = task.parts[first + i];
        Weigh<Arch>(logits + i * kScoreBurstBlocks * kBlockTokens, blocks, task.step2[first + i],
                    parts.max + burst, parts.sums + burst * kScoreBurstBlocks);
        if (burst == 0) *parts.step2 = task.step2[first + i];
      }
    }
  }
}

// What a burst's sums are times, to be over the row's maximum: 16 bursts at a time.
template <typename Arch>
inline void BurstFactors(const QueryParts& parts, int first, int bursts, int32_t max, float* factors) {
  const typename Arch::I below = Arch::SubInt(Arch::LoadInt(parts.max + first), Arch::SetInt(max));
  const typename Arch::V x = Arch::Mul(Arch::ToFloat(below), Arch::Set(*parts.step2));
  Arch::Store(factors, Arch::Select(std::min(bursts - first, kScoreBurstBlocks), Exp2Negative<Arch>(x),
                                    Arch::Set(0.0f)));
}

template <typename Arch>
void Combine(const QueryParts& parts, int blocks, int queries, bool add, float* scores) {
  const int bursts = ScoreBursts(blocks);
  const int32_t max = *std::max_element(parts.max, parts.max + bursts);
  alignas(64) float factors[kScoreBurstBlocks];
  typename Arch::V mass = Arch::Set(0.0f);
  for (int first = 0; first < bursts; first += kScoreBurstBlocks) {
    BurstFactors<Arch>(parts, first, bursts, max, factors);
    for (int i = first; i < std::min(first + kScoreBurstBlocks, bursts); ++i) {
      mass = Arch::Fma(Arch::Set(factors[i - first]), Arch::Load(parts.sums + i * kScoreBurstBlocks), mass);
    }
  }
  const float share = 1.0f / (Arch::ReduceAdd(mass) * static_cast<float>(queries));
  for (int first = 0; first < bursts; first += kScoreBurstBlocks) {
    BurstFactors<Arch>(parts, first, bursts, max, factors);
    for (int i = first; i < std::min(first + kScoreBurstBlocks, bursts); ++i) {
      float* out = scores + i * kScoreBurstBlocks;
      const int count = std::min(kScoreBurstBlocks, blocks - i * kScoreBurstBlocks);
      alignas(64) float tail[kScoreBurstBlocks] = {};
      if (count < kScoreBurstBlocks) {
        std::copy_n(out, add ? count : 0, tail);
        out = tail;
      }
      const typename Arch::V before = add ? Arch::LoadUnaligned(out) : Arch::Set(0.0f);
      Arch::StoreUnaligned(out, Arch::Fma(Arch::Set(factors[i - first] * share),
                                          Arch::Load(parts.sums + i * kScoreBurstBlocks), before));
      if (count < kScoreBurstBlocks) std::copy_n(tail, count, scores + i * kScoreBurstBlocks);
    }
  }
}

}  // namespace
}  // namespace kvt
