// The AVX2, FMA and F16C implementation of attention_impl.h's Arch; f32 products. Included by
// *_isa_avx2.cc only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvt {
namespace {

struct Avx2 {
  struct V {
    __m256 lo;
    __m256 hi;
  };
  using B = V;
  using Operand = float;
  static constexpr int kPack = 1;
  static constexpr bool kRowInRegisters = false;  // too few registers
  static constexpr int kRows = 3;
  static constexpr int Columns(int) { return 2; }
  // 2^f on [-0.5, 0.5] is 1 + f (c0 + f (c1 + ...)), minimax; relative error 7.9e-8 in f32.
  static constexpr float kExp2[] = {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                                    9.618436918e-03f, 1.339887502e-03f, 1.535336196e-04f};

  static V Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static V Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V Load(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
  static V LoadUnaligned(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void Store(float* p, V v) {
    _mm256_store_ps(p, v.lo);
    _mm256_store_ps(p + 8, v.hi);
  }
  static void StoreUnaligned(float* p, V v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  static V Add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static V Sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static V Mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static V Div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static V Max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static V Fma(V a, V b, V c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static V Dot(V acc, B a, B b) { return Fma(a, b, acc); }
  static float First(V v) { return _mm256_cvtss_f32(v.lo); }
  static float ReduceMax(V v) {
    const __m256 m = _mm256_max_ps(v.lo, v.hi);
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static float ReduceAdd(V v) {
    const __m256 m = _mm256_add_ps(v.lo, v.hi);
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static V Round(V v) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(v.lo, kMode), _mm256_round_ps(v.hi, kMode)};
  }
  static __m256 ScaleOrZero(__m256 p, __m256 n, __m256 x, __m256 limit) {
    const __m256i exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ),
                         _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
  }
  // p * 2^n, 0 where x < limit.
  static V ScaleOrZero(V p, V n, V x, float limit) {
    const __m256 least = _mm256_set1_ps(limit);
    return {ScaleOrZero(p.lo, n.lo, x.lo, least), ScaleOrZero(p.hi, n.hi, x.hi, least)};
  }
  static __m256 SelectHalf(int count, __m256 a, __m256 b) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i take = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(take));
  }
  // Lanes below `count` of a, the others of b.
  static V Select(int count, V a, V b) {
    return {SelectHalf(count, a.lo, b.lo), SelectHalf(count - 8, a.hi, b.hi)};
  }
  static void Prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }

  // To nearest, ties to even; a NaN stays one. The result is in the upper half.
  static __m256 RoundBf16(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i kept = _mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(_mm256_castsi256_ps(kept), nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  static B LoadOperands(const float* p) { return Load(p); }
  static B Broadcast(const float* p) { return Set(*p); }
  static void StoreWeights(float* p, V a) { Store(p, a); }
  static void StoreWeights(float* p, V a, V b) {
    StoreWeights(p, a);
    StoreWeights(p + 16, b);
  }
  static void StoreBf16(uint16_t* p, V v) {
    const __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(RoundBf16(v.lo)), 16);
    const __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(RoundBf16(v.hi)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8));
  }
  static void StoreOperands(float* p, B b) { Store(p, b); }
  template <bool kTarget>
  static void KOperands(const uint8_t* base, const uint8_t* residual, B* out) {
    const __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base));
    const __m256i lower = kTarget ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(residual))
                                  : _mm256_set1_epi8(static_cast<char>(0x80));
    const __m256i first = _mm256_unpacklo_epi8(lower, upper);
    const __m256i second = _mm256_unpackhi_epi8(lower, upper);
    out[0] = {_mm256_cvtph_ps(_mm256_castsi256_si128(first)),
              _mm256_cvtph_ps(_mm256_extracti128_si256(first, 1))};
    out[1] = {_mm256_cvtph_ps(_mm256_castsi256_si128(second)),
              _mm256_cvtph_ps(_mm256_extracti128_si256(second, 1))};
  }
  template <bool kTarget>
  static void VOperands(const uint8_t* base, const uint8_t* residual, int, B* out) {
    KOperands<kTarget>(base, residual, out);
  }
  template <bool kTarget>
  static void LastVOperands(const uint8_t*, const uint8_t*, int, B* out) {
    out[0] = out[1] = Zero();
  }
};

}  // namespace
}  // namespace kvt
