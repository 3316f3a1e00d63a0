// Paged attention with AVX512_BF16 dot products (pairs of channels for scores, pairs of keys for
// outputs). Compiled with -mavx512bf16 besides what attention_isa_avx512.cc needs.
#include "kernels/cpu/attention_isa_avx512.h"

#include "kernels/cpu/attention_impl.h"

namespace kvt {
namespace {

struct ArchDot : Avx512 {
  using B = __m512i;
  using Operand = uint32_t;  // two bf16: the lower half is the first of the pair
  static constexpr int kPack = 2;
  // 2^f on [-0.5, 0.5], minimax; relative error 2.9e-6: the weights are rounded to 8 bits afterwards.
  static constexpr float kExp2[] = {6.931241751e-01f, 2.402409911e-01f, 5.590642616e-02f,
                                    9.582852945e-03f};

  static B LoadOperands(const uint32_t* p) { return _mm512_load_si512(p); }
  static B Broadcast(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
  static V Dot(V acc, B a, B b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
  static void StoreWeights(uint32_t* p, V a, V b) {
    _mm512_store_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  static void StoreWeights(uint32_t* p, V a) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
  }
  static void StoreBf16(uint16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  }
  // Lane i = (first[i], second[i]) as bf16.
  static __m512i Pair(V first, V second) {
    alignas(64) static constexpr uint16_t kInterleave[32] = {
        0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave),
                                    (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }
  static void StoreOperands(uint32_t* p, B b) { _mm512_store_si512(p, b); }
  template <bool kTarget>
  static void KOperands(const uint8_t* base, const uint8_t* residual, B* out) {
    const Row row = JoinRow<kTarget>(base, residual);
    out[0] = Pair(row.g0, row.g1);
  }
  template <bool kTarget>
  static void VOperands(const uint8_t* base, const uint8_t* residual, int dim, B* out) {
    const Row first = JoinRow<kTarget>(base, residual);
    const Row second = JoinRow<kTarget>(base + dim, residual + dim);
    out[0] = Pair(first.g0, second.g0);
    out[1] = Pair(first.g1, second.g1);
  }
  template <bool kTarget>
  static void LastVOperands(const uint8_t* base, const uint8_t* residual, int valid, B* out) {
    Row first = {Zero(), Zero()};
    if (valid > 0) first = JoinRow<kTarget>(base, residual);
    out[0] = Pair(first.g0, Zero());
    out[1] = Pair(first.g1, Zero());
  }
};

}  // namespace

const AttentionIsa& AttentionAvx512Bf16() {
  static constexpr AttentionIsa kIsa = {"avx512bf16", Attention<ArchDot>::Run,
                                        Attention<ArchDot>::Combine};
  return kIsa;
}

}  // namespace kvt
