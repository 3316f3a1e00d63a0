// Scores with AVX2 and FMA: what every processor of the default build has.
#include "kernels/cpu/select_impl.h"

namespace kvt {
namespace {

struct ScoreArch {
  struct V {
    __m256 lo;
    __m256 hi;
  };
  static V Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static V Add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static V Sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static V Mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static V Fma(V a, V b, V c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static V Round(V v) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(v.lo, kMode), _mm256_round_ps(v.hi, kMode)};
  }
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
  static V FromBytes(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
  }
};

}  // namespace

const ScoreIsa kScoreIsaAvx2 = {"avx2", &ScoreBlock<ScoreArch>};

}  // namespace kvt
