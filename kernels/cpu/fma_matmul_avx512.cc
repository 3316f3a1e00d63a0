// Compiled for AVX-512 (F, BW, DQ, VL); called only where the processor has it. 32 registers: a tile
// of 14 rows x 2 vectors.
#include <immintrin.h>

#include "kernels/cpu/fma_matmul.h"

namespace kvt {
namespace {

struct Simd {
  using V = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRowsMax = 14;
  static constexpr int kBlockVectors = 2;
  static constexpr int kWideAccumulatorsMax = 16;

  static V Zero() { return _mm512_setzero_ps(); }
  static V Set(float x) { return _mm512_set1_ps(x); }
  static V Load(const void* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static __mmask16 Mask(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1); }
  static V MaskLoad(const float* p, int n) { return _mm512_maskz_loadu_ps(Mask(n), p); }
  static void MaskStore(float* p, V v, int n) { _mm512_mask_storeu_ps(p, Mask(n), v); }
  static V Broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V Add(V a, V b) { return _mm512_add_ps(a, b); }
  static V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm512_div_ps(a, b); }
  static V Negate(V a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static void LoadPair(const uint8_t* p, V* low, V* high) {
    const __m512i raw = _mm512_loadu_si512(p);
    *low = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    *high = _mm512_castsi512_ps(_mm512_maskz_mov_epi16(0xaaaaaaaau, raw));
  }
  // e^x to about 1 ulp; x is clamped to where e^x is finite and normal, a NaN stays.
  static V Exp(V x) {
    x = _mm512_min_ps(Set(88.0f), _mm512_max_ps(Set(-87.0f), x));
    const V n = _mm512_roundscale_ps(_mm512_mul_ps(x, Set(1.44269504f)), 0);
    V r = _mm512_fnmadd_ps(n, Set(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, Set(-2.12194440e-4f), r);
    V y = Set(1.9875691500e-4f);
    y = Fma(y, r, Set(1.3981999507e-3f));
    y = Fma(y, r, Set(8.3334519073e-3f));
    y = Fma(y, r, Set(4.1665795894e-2f));
    y = Fma(y, r, Set(1.6666665459e-1f));
    y = Fma(y, r, Set(5.0000001201e-1f));
    y = Fma(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, Set(1.0f)));
    return _mm512_scalef_ps(y, n);
  }
  // Rounds to nearest even; a NaN stays a NaN.
  static void StoreBf16(uint16_t* p, V v, int n) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    rounded = _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fc00000),
                                    _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), rounded);
    _mm256_mask_storeu_epi16(p, Mask(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
};

}  // namespace
}  // namespace kvt

#include "kernels/cpu/fma_matmul_impl.h"

namespace kvt {

void FmaMatmulAvx512(const FmaMatmulArgs& args, int member, int members) {
  RunMember(args, member, members);
}

}  // namespace kvt
