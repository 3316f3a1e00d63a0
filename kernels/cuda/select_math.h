// The arithmetic of selection, for host and device: the operations of kernels/layout/digest.h and
// of the CPU (kernels/cpu/select_impl.h), each rounded where theirs is, so that digests, logits
// and, summed in the same order, scores are the CPU's bit for bit. That needs a compiler that joins
// no product and sum by itself (nvcc: -fmad=false); what is meant to be joined says fmaf. Tests run
// it on the host.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/layout/digest.h"
#include "kernels/selection.h"

#ifdef __CUDACC__
#define KVT_HOST_DEVICE __host__ __device__
#else
#define KVT_HOST_DEVICE
#endif
#ifdef __CUDA_ARCH__
#define KVT_UNROLL _Pragma("unroll")
#else
#define KVT_UNROLL
#endif

namespace kvt {

// DigestQuantise.
KVT_HOST_DEVICE inline uint32_t SelectKeyCode(float key, float offset, float inverse_scale,
                                              int bits) {
  const float most = static_cast<float>((1 << bits) - 1);
  const float code = (key - offset) * inverse_scale + 0.5f * most;
  if (!(code > 0)) return 0;
  if (code >= most) return (1u << bits) - 1;
  return static_cast<uint32_t>(rintf(code));
}

// A row of a digest is 16 words, one for each token; the word holds 8 / kWidth groups of four
// channels, bits [kWidth * g, kWidth * (g + 1)) of its bytes being group g. This is the word of the
// codes of its channels, of which code(i) gives number i.
template <int kWidth, typename Code>
KVT_HOST_DEVICE inline uint32_t SelectRowWord(Code code) {
  uint32_t word = 0;
  KVT_UNROLL
  for (int i = 0; i < 32 / kWidth; ++i) word |= code(i) << (8 * (i % 4) + kWidth * (i / 4));
  return word;
}

// Writes the codes of channels [first, first + 32) of one token; code(i) is that of first + i.
template <int kBits, typename Code>
KVT_HOST_DEVICE inline void SelectWriteCodes(uint32_t* digest, int head_dim, int token, int first,
                                             Code code) {
  constexpr int kLow = kBits == 4 ? 4 : 2;
  constexpr int kRowChannels = 32 / kLow;
  KVT_UNROLL
  for (int r = 0; r < 32 / kRowChannels; ++r) {
    digest[(first / kRowChannels + r) * kBlockTokens + token] =
        SelectRowWord<kLow>([&](int i) { return code(r * kRowChannels + i) & ((1u << kLow) - 1); });
  }
  if constexpr (kBits == 3) {
    const int rows = head_dim / kRowChannels;
    digest[(rows + first / 32) * kBlockTokens + token] =
        SelectRowWord<1>([&](int i) { return code(i) >> 2; });
  }
}

// sum + the products of four bytes of codes and of a query.
KVT_HOST_DEVICE inline int32_t SelectDot4(uint32_t codes, int32_t q, int32_t sum) {
#ifdef __CUDA_ARCH__
  return __dp4a(static_cast<int>(codes), q, sum);  // codes are below 128
#else
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<int32_t>(codes >> 8 * i & 0xff) *
           static_cast<int8_t>(static_cast<uint32_t>(q) >> 8 * i);
  }
  return sum;
#endif
}

// The groups of a query that meet one row, in one load.
template <int kGroups>
struct alignas(kGroups == 2 ? 8 : 16) SelectRowQuery {
  int32_t words[kGroups];
};

// Adds the products of one word and kQueries queries, `words` apart, at the row's first channel.
template <int kWidth, int kQueries>
KVT_HOST_DEVICE inline void SelectAddWord(uint32_t word, const int32_t* q, int words,
                                          int32_t (&sums)[kQueries]) {
  constexpr int kGroups = 8 / kWidth;
  using RowQuery = SelectRowQuery<kGroups>;
  KVT_UNROLL
  for (int i = 0; i < kQueries; ++i) {
    RowQuery row;
    memcpy(&row, __builtin_assume_aligned(q + i * words, alignof(RowQuery)), sizeof(row));
    KVT_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t codes = word >> (kWidth * g) & (0x01010101u * ((1u << kWidth) - 1));
      sums[i] = SelectDot4(codes, row.words[g], sums[i]);
    }
  }
}

// Logits of one token of a block: sums over the channels of code * query, exact. `q` is
// [kQueries][head_dim] in 8 bits, four to a word, 16-byte aligned.
template <int kBits, int kQueries>
KVT_HOST_DEVICE inline void SelectLogits(const uint32_t* digest, int head_dim, int token,
                                         const int32_t* q, int32_t (&sums)[kQueries]) {
  constexpr int kLow = kBits == 4 ? 4 : 2;
  const int words = head_dim / 4;
  const uint32_t* row = digest + token;
  for (int i = 0; i < kQueries; ++i) sums[i] = 0;
  for (int w = 0; w < words; w += 8 / kLow, row += kBlockTokens) {
    SelectAddWord<kLow>(*row, q + w, words, sums);
  }
  if constexpr (kBits == 3) {
    int32_t high[kQueries] = {};
    for (int w = 0; w < words; w += 8, row += kBlockTokens) {
      SelectAddWord<1>(*row, q + w, words, high);
    }
    for (int i = 0; i < kQueries; ++i) sums[i] += 4 * high[i];
  }
}

// DigestQuantiseQuery in two steps: the largest SelectMagnitude of the products q[d] * scale[d]
// gives the step, then each product its code.
KVT_HOST_DEVICE inline uint32_t SelectMagnitude(float product) {
  return std::bit_cast<uint32_t>(product) & 0x7fffffffu;
}
struct SelectQueryScale {
  float step = 1;
  float inverse = 0;  // 0: all codes are
};
KVT_HOST_DEVICE inline SelectQueryScale SelectQueryScaleOf(uint32_t largest) {
  const float most = std::bit_cast<float>(largest);
  if (!(most <= 3.402823466e+38f) || most < kDigestQueryLeast) return {};
  return {most / static_cast<float>(kDigestQueryMax), static_cast<float>(kDigestQueryMax) / most};
}
KVT_HOST_DEVICE inline int8_t SelectQueryCode(float product, SelectQueryScale scale) {
  return scale.inverse == 0 ? int8_t{0} : static_cast<int8_t>(rintf(product * scale.inverse));
}

// 2^x for x <= 0; 0 where x < -125.
KVT_HOST_DEVICE inline float SelectExp2(float x) {
  if (x < -125.0f) return 0;
  const float n = rintf(x);
  const float f = x - n;
  float p = 1.535336196e-04f;
  p = fmaf(p, f, 1.339887502e-03f);
  p = fmaf(p, f, 9.618436918e-03f);
  p = fmaf(p, f, 5.550332367e-02f);
  p = fmaf(p, f, 2.402264774e-01f);
  p = fmaf(p, f, 6.931471825e-01f);
  p = fmaf(p, f, 1.0f);
  return p * std::bit_cast<float>((static_cast<uint32_t>(static_cast<int>(n)) + 127u) << 23);
}
// What a logit weighs beside the largest.
KVT_HOST_DEVICE inline float SelectWeight(int32_t logit, int32_t largest, float step2) {
  return SelectExp2(static_cast<float>(logit - largest) * step2);
}

// In order of scores, as unsigned numbers; a NaN as minus infinity, -0 as 0.
KVT_HOST_DEVICE inline uint32_t SelectRank(float score) {
  const float number = score == score ? score + 0.0f : -INFINITY;
  const auto bits = std::bit_cast<uint32_t>(number);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace kvt
