// The AVX-512 implementation of select_impl.h's Arch. Included by select_isa_*.cc only.
#pragma once

#include "kernels/cpu/attention_isa_avx512.h"

namespace kvt {
namespace {

struct ScoreAvx512 : Avx512 {
  using I = __m512i;
  using B = __m512i;

  static I ZeroInt() { return _mm512_setzero_si512(); }
  static I SetInt(int32_t x) { return _mm512_set1_epi32(x); }
  static I LoadInt(const int32_t* p) { return _mm512_load_si512(p); }
  static void StoreInt(int32_t* p, I v) { _mm512_store_si512(p, v); }
  static I SubInt(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I MaxInt(I a, I b) { return _mm512_max_epi32(a, b); }
  static I AddTimes4(I a, I b) { return _mm512_add_epi32(a, _mm512_slli_epi32(b, 2)); }
  static int32_t ReduceMaxInt(I v) { return _mm512_reduce_max_epi32(v); }
  static V ToFloat(I v) { return _mm512_cvtepi32_ps(v); }

  static B LoadBytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
  // Bits [shift, shift + kWidth) of every byte.
  template <int kWidth>
  static B Field(B b, int shift) {
    return _mm512_and_si512(_mm512_srli_epi16(b, static_cast<unsigned>(shift)),
                            _mm512_set1_epi8((1 << kWidth) - 1));
  }
  static __m512i Broadcast4(const int8_t* q) {
    return _mm512_broadcastd_epi32(_mm_loadu_si32(q));
  }
  // acc + a . q[0..4) + b . q[4..8), of every four neighbouring bytes. Sums of 4 x 15 x 127 at most
  // fit 16 bits.
  static I DotPair(I acc, B a, B b, const int8_t* q) {
    const __m512i sums = _mm512_add_epi16(_mm512_maddubs_epi16(a, Broadcast4(q)),
                                          _mm512_maddubs_epi16(b, Broadcast4(q + 4)));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(sums, _mm512_set1_epi16(1)));
  }

  // Within each quarter of 4 lanes: lane i is the sum of vector i's quarter, (0 + 2) + (1 + 3).
  using Sums4 = V;
  static Sums4 Sum4(V a, V b, V c, V d) {
    const V ab = Add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const V cd = Add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return Add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  // Quarters 0 + 1 and 2 + 3 of a, then of b.
  static V Halves(V a, V b) {
    return Add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  static V Sum16(Sums4 a, Sums4 b, Sums4 c, Sums4 d) { return Halves(Halves(a, b), Halves(c, d)); }
};

}  // namespace
}  // namespace kvt
