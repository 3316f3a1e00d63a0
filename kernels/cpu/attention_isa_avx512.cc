// Paged attention with AVX-512F and f32 products. Compiled with -mavx512f -mavx512bw -mavx512dq
// -mavx512vl.
#include "kernels/cpu/attention_isa_avx512.h"

#include "kernels/cpu/attention_impl.h"

namespace kvt {
namespace {

struct ArchF32 : Avx512 {
  using B = __m512;
  using Operand = float;
  static constexpr int kPack = 1;
  // 2^f on [-0.5, 0.5] is 1 + f (c0 + f (c1 + ...)), minimax; relative error 7.9e-8 in f32.
  static constexpr float kExp2[] = {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                                    9.618436918e-03f, 1.339887502e-03f, 1.535336196e-04f};

  static B LoadOperands(const float* p) { return _mm512_load_ps(p); }
  static B Broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static V Dot(V acc, B a, B b) { return _mm512_fmadd_ps(a, b, acc); }
  static void StoreWeights(float* p, V a) { _mm512_store_ps(p, a); }
  static void StoreWeights(float* p, V a, V b) {
    _mm512_store_ps(p, a);
    _mm512_store_ps(p + 16, b);
  }
  // To nearest, ties to even; a NaN stays one.
  static void StoreBf16(uint16_t* p, V v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  static void StoreOperands(float* p, B b) { _mm512_store_ps(p, b); }
  template <bool kTarget>
  static void KOperands(const uint8_t* base, const uint8_t* residual, B* out) {
    const Row row = JoinRow<kTarget>(base, residual);
    out[0] = row.g0;
    out[1] = row.g1;
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

const AttentionIsa& AttentionAvx512() {
  static constexpr AttentionIsa kIsa = {"avx512", Attention<ArchF32>::Run,
                                        Attention<ArchF32>::Combine};
  return kIsa;
}

}  // namespace kvt
