// Compiled with AVX-512F; called only after a run-time check. Free of inline-heavy headers, so that
// no AVX-512 copy of a shared inline function is linked into the rest of the program.
#include <immintrin.h>

#include "kernels/layout/checksum_xxh3.h"

namespace kvt::xxh3 {
namespace {

inline __m512i LoadSecret(size_t offset) { return _mm512_loadu_si512(kSecret + offset); }

inline void Prefetch(const std::byte* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

template <CopyMode kMode>
inline void Store(std::byte* dst, __m512i value) {
  if constexpr (kMode == CopyMode::kStreaming) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), value);
  } else if constexpr (kMode == CopyMode::kCached) {
    _mm512_storeu_si512(dst, value);
  }
}

inline __m512i Accumulate(__m512i acc, __m512i data, __m512i secret) {
  const __m512i keyed = _mm512_xor_si512(data, secret);
  const __m512i high = _mm512_srli_epi64(keyed, 32);
  const __m512i product = _mm512_mul_epu32(keyed, high);
  const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
  return _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
}

inline __m512i Scramble(__m512i acc) {
  const __m512i prime = _mm512_set1_epi32(static_cast<int>(kPrime32_1));
  const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)),
                                         LoadSecret(kScrambleSecret));
  const __m512i low = _mm512_mul_epu32(mixed, prime);
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
  return _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
}

template <CopyMode kMode, bool kPrefetch>
uint64_t HashCopy(std::byte* dst, const std::byte* src, size_t size, const std::byte* ahead) {
  __m512i acc = _mm512_load_si512(kInit);
  const size_t stripes = size / kStripeBytes;
  size_t at = 0;  // stripe
  while (stripes - at > kBlockStripes) {
    for (size_t i = 0; i < kBlockStripes; ++i) {
      if constexpr (kPrefetch) Prefetch(ahead + (at + i) * kStripeBytes);
      const __m512i data = _mm512_loadu_si512(src + (at + i) * kStripeBytes);
      Store<kMode>(dst + (at + i) * kStripeBytes, data);
      acc = Accumulate(acc, data, LoadSecret(8 * i));
    }
    acc = Scramble(acc);
    at += kBlockStripes;
  }
  for (size_t i = 0; at + i + 1 < stripes; ++i) {
    if constexpr (kPrefetch) Prefetch(ahead + (at + i) * kStripeBytes);
    const __m512i data = _mm512_loadu_si512(src + (at + i) * kStripeBytes);
    Store<kMode>(dst + (at + i) * kStripeBytes, data);
    acc = Accumulate(acc, data, LoadSecret(8 * i));
  }
  const size_t last = (stripes - 1) * kStripeBytes;
  if constexpr (kPrefetch) Prefetch(ahead + last);
  const __m512i data = _mm512_loadu_si512(src + last);
  Store<kMode>(dst + last, data);
  acc = Accumulate(acc, data, LoadSecret(kLastStripeSecret));
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, acc);
  return Merge(lanes, size);
}

template <CopyMode kMode, bool kPrefetch>
void Copy(std::byte* dst, const std::byte* src, size_t size, const std::byte* ahead) {
  size_t at = 0;
  for (; at + 256 <= size; at += 256) {
    if constexpr (kPrefetch) {
      for (size_t i = 0; i < 256; i += 64) Prefetch(ahead + at + i);
    }
    const __m512i a = _mm512_loadu_si512(src + at);
    const __m512i b = _mm512_loadu_si512(src + at + 64);
    const __m512i c = _mm512_loadu_si512(src + at + 128);
    const __m512i d = _mm512_loadu_si512(src + at + 192);
    Store<kMode>(dst + at, a);
    Store<kMode>(dst + at + 64, b);
    Store<kMode>(dst + at + 128, c);
    Store<kMode>(dst + at + 192, d);
  }
  for (; at < size; at += 64) Store<kMode>(dst + at, _mm512_loadu_si512(src + at));
}

template <bool kPrefetch>
uint64_t HashCopyMode(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
                      const std::byte* ahead) {
  switch (mode) {
    case CopyMode::kNone:
      return HashCopy<CopyMode::kNone, kPrefetch>(dst, src, size, ahead);
    case CopyMode::kCached:
      return HashCopy<CopyMode::kCached, kPrefetch>(dst, src, size, ahead);
    case CopyMode::kStreaming:
      return HashCopy<CopyMode::kStreaming, kPrefetch>(dst, src, size, ahead);
  }
  return 0;
}

template <bool kPrefetch>
void CopyMany(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
              const std::byte* ahead) {
  switch (mode) {
    case CopyMode::kNone:
      return;
    case CopyMode::kCached:
      return Copy<CopyMode::kCached, kPrefetch>(dst, src, size, ahead);
    case CopyMode::kStreaming:
      return Copy<CopyMode::kStreaming, kPrefetch>(dst, src, size, ahead);
  }
}

}  // namespace

uint64_t HashCopyAvx512(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
                        const std::byte* ahead) {
  return ahead != nullptr ? HashCopyMode<true>(dst, src, size, mode, ahead)
                          : HashCopyMode<false>(dst, src, size, mode, ahead);
}

void CopyAvx512(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
                const std::byte* ahead) {
  if (ahead != nullptr) {
    CopyMany<true>(dst, src, size, mode, ahead);
  } else {
    CopyMany<false>(dst, src, size, mode, ahead);
  }
}

}  // namespace kvt::xxh3
