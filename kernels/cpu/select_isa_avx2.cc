// Scores with AVX2 and FMA: what every processor of the default build has.
#include "kernels/cpu/attention_isa_avx2.h"
#include "kernels/cpu/select_impl.h"

namespace kvt {
namespace {

struct ScoreArch : Avx2 {
  struct I {
    __m256i lo;
    __m256i hi;
  };
  using B = I;

  static __m256i At(const void* p, int half) {
    return _mm256_load_si256(static_cast<const __m256i*>(p) + half);
  }
  static I ZeroInt() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static I SetInt(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I LoadInt(const int32_t* p) { return {At(p, 0), At(p, 1)}; }
  static void StoreInt(int32_t* p, I v) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), v.lo);
    _mm256_store_si256(reinterpret_cast<__m256i*>(p) + 1, v.hi);
  }
  static I SubInt(I a, I b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
  static I MaxInt(I a, I b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
  static I AddTimes4(I a, I b) {
    return {_mm256_add_epi32(a.lo, _mm256_slli_epi32(b.lo, 2)),
            _mm256_add_epi32(a.hi, _mm256_slli_epi32(b.hi, 2))};
  }
  static int32_t ReduceMaxInt(I v) {
    const __m256i m = _mm256_max_epi32(v.lo, v.hi);
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
  }
  static V ToFloat(I v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }

  static B LoadBytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1)};
  }
  // Bits [shift, shift + kWidth) of every byte.
  template <int kWidth>
  static B Field(B b, int shift) {
    const __m256i mask = _mm256_set1_epi8((1 << kWidth) - 1);
    return {_mm256_and_si256(_mm256_srli_epi16(b.lo, shift), mask),
            _mm256_and_si256(_mm256_srli_epi16(b.hi, shift), mask)};
  }
  // Sums of 4 x 15 x 127 at most fit 16 bits.
  static __m256i DotPairHalf(__m256i acc, __m256i a, __m256i b, __m256i qa, __m256i qb) {
    const __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16(a, qa), _mm256_maddubs_epi16(b, qb));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
  }
  // acc + a . q[0..4) + b . q[4..8), of every four neighbouring bytes.
  static I DotPair(I acc, B a, B b, const int8_t* q) {
    const __m256i qa = _mm256_set1_epi32(_mm_cvtsi128_si32(_mm_loadu_si32(q)));
    const __m256i qb = _mm256_set1_epi32(_mm_cvtsi128_si32(_mm_loadu_si32(q + 4)));
    return {DotPairHalf(acc.lo, a.lo, b.lo, qa, qb), DotPairHalf(acc.hi, a.hi, b.hi, qa, qb)};
  }

  // Within each quarter of 4 lanes: lane i is the sum of vector i's quarter, (0 + 2) + (1 + 3).
  using Sums4 = V;
  static __m256 Quarters(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  }
  static Sums4 Sum4(V a, V b, V c, V d) {
    return {Quarters(a.lo, b.lo, c.lo, d.lo), Quarters(a.hi, b.hi, c.hi, d.hi)};
  }
  // (quarter 0 + quarter 1) + (quarter 2 + quarter 3), of each.
  static __m128 Halves(V v) {
    return _mm_add_ps(
        _mm_add_ps(_mm256_castps256_ps128(v.lo), _mm256_extractf128_ps(v.lo, 1)),
        _mm_add_ps(_mm256_castps256_ps128(v.hi), _mm256_extractf128_ps(v.hi, 1)));
  }
  static V Sum16(Sums4 a, Sums4 b, Sums4 c, Sums4 d) {
    return {_mm256_set_m128(Halves(b), Halves(a)), _mm256_set_m128(Halves(d), Halves(c))};
  }
};

}  // namespace

const ScoreIsa kScoreIsaAvx2 = {"avx2", &Logits<ScoreArch>, &Score<ScoreArch>, &Combine<ScoreArch>};

}  // namespace kvt
