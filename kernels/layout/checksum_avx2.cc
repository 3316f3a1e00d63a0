// The baseline of the build (x86-64-v3).
#include <immintrin.h>

#include "kernels/layout/checksum_xxh3.h"

namespace kvt::xxh3 {
namespace {

struct Stripe {
  __m256i low;
  __m256i high;
};

inline Stripe Load(const void* at) {
  const auto* p = static_cast<const __m256i*>(at);
  return {_mm256_loadu_si256(p), _mm256_loadu_si256(p + 1)};
}

inline void Prefetch(const std::byte* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_T0);
}

template <CopyMode kMode>
inline void Store(std::byte* dst, Stripe value) {
  auto* p = reinterpret_cast<__m256i*>(dst);
  if constexpr (kMode == CopyMode::kStreaming) {
    _mm256_stream_si256(p, value.low);
    _mm256_stream_si256(p + 1, value.high);
  } else if constexpr (kMode == CopyMode::kCached) {
    _mm256_storeu_si256(p, value.low);
    _mm256_storeu_si256(p + 1, value.high);
  }
}

inline __m256i Accumulate(__m256i acc, __m256i data, __m256i secret) {
  const __m256i keyed = _mm256_xor_si256(data, secret);
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
}

inline Stripe Accumulate(Stripe acc, Stripe data, size_t secret_offset) {
  const Stripe secret = Load(kSecret + secret_offset);
  return {Accumulate(acc.low, data.low, secret.low), Accumulate(acc.high, data.high, secret.high)};
}

inline __m256i Scramble(__m256i acc, __m256i secret) {
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
  const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), secret);
  const __m256i low = _mm256_mul_epu32(mixed, prime);
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

template <CopyMode kMode, bool kPrefetch>
uint64_t HashCopy(std::byte* dst, const std::byte* src, size_t size, const std::byte* ahead) {
  Stripe acc = Load(kInit);
  const size_t stripes = size / kStripeBytes;
  size_t at = 0;  // stripe
  while (stripes - at > kBlockStripes) {
    for (size_t i = 0; i < kBlockStripes; ++i) {
      if constexpr (kPrefetch) Prefetch(ahead + (at + i) * kStripeBytes);
      const Stripe data = Load(src + (at + i) * kStripeBytes);
      Store<kMode>(dst + (at + i) * kStripeBytes, data);
      acc = Accumulate(acc, data, 8 * i);
    }
    const Stripe secret = Load(kSecret + kScrambleSecret);
    acc = {Scramble(acc.low, secret.low), Scramble(acc.high, secret.high)};
    at += kBlockStripes;
  }
  for (size_t i = 0; at + i + 1 < stripes; ++i) {
    if constexpr (kPrefetch) Prefetch(ahead + (at + i) * kStripeBytes);
    const Stripe data = Load(src + (at + i) * kStripeBytes);
    Store<kMode>(dst + (at + i) * kStripeBytes, data);
    acc = Accumulate(acc, data, 8 * i);
  }
  const size_t last = (stripes - 1) * kStripeBytes;
  if constexpr (kPrefetch) Prefetch(ahead + last);
  const Stripe data = Load(src + last);
  Store<kMode>(dst + last, data);
  acc = Accumulate(acc, data, kLastStripeSecret);
  alignas(32) uint64_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), acc.low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 4), acc.high);
  return Merge(lanes, size);
}

template <CopyMode kMode, bool kPrefetch>
void Copy(std::byte* dst, const std::byte* src, size_t size, const std::byte* ahead) {
  size_t at = 0;
  for (; at + 128 <= size; at += 128) {
    if constexpr (kPrefetch) {
      for (size_t i = 0; i < 128; i += 64) Prefetch(ahead + at + i);
    }
    const Stripe a = Load(src + at);
    const Stripe b = Load(src + at + 64);
    Store<kMode>(dst + at, a);
    Store<kMode>(dst + at + 64, b);
  }
  for (; at < size; at += 64) Store<kMode>(dst + at, Load(src + at));
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

uint64_t HashCopyAvx2(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
                      const std::byte* ahead) {
  return ahead != nullptr ? HashCopyMode<true>(dst, src, size, mode, ahead)
                          : HashCopyMode<false>(dst, src, size, mode, ahead);
}

void CopyAvx2(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
              const std::byte* ahead) {
  if (ahead != nullptr) {
    CopyMany<true>(dst, src, size, mode, ahead);
  } else {
    CopyMany<false>(dst, src, size, mode, ahead);
  }
}

}  // namespace kvt::xxh3
