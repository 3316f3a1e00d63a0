// The AVX-512F implementation of attention_impl.h's Arch. Included by *_isa_avx512*.cc only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvt {
namespace {

struct Avx512 {
  using V = __m512;
  static constexpr bool kRowInRegisters = true;
  static constexpr int kRows = 6;
  static constexpr int Columns(int) { return 4; }

  static V Zero() { return _mm512_setzero_ps(); }
  static V Set(float x) { return _mm512_set1_ps(x); }
  static V Load(const float* p) { return _mm512_load_ps(p); }
  static V LoadUnaligned(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, V v) { _mm512_store_ps(p, v); }
  static void StoreUnaligned(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V Add(V a, V b) { return _mm512_add_ps(a, b); }
  static V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm512_div_ps(a, b); }
  static V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V Max(V a, V b) { return _mm512_max_ps(a, b); }
  static float First(V v) { return _mm512_cvtss_f32(v); }
  static float ReduceMax(V v) { return _mm512_reduce_max_ps(v); }
  static float ReduceAdd(V v) { return _mm512_reduce_add_ps(v); }
  static V Round(V v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // p * 2^n, 0 where x < limit.
  static V ScaleOrZero(V p, V n, V x, float limit) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(keep, p, n);
  }
  // Lanes below `count` of a, the others of b.
  static V Select(int count, V a, V b) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1), b, a);
  }
  static void Prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

  // Joins the planes of one row of 32 bytes of the named layout: group 0 and group 1, 16 values each.
  struct Row {
    __m512 g0;
    __m512 g1;
  };
  template <bool kTarget>
  static Row JoinRow(const uint8_t* base, const uint8_t* residual) {
    const __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base));
    const __m256i lower = kTarget ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(residual))
                                  : _mm256_set1_epi8(static_cast<char>(0x80));
    return {_mm512_cvtph_ps(_mm256_unpacklo_epi8(lower, upper)),
            _mm512_cvtph_ps(_mm256_unpackhi_epi8(lower, upper))};
  }
};

}  // namespace
}  // namespace kvt
