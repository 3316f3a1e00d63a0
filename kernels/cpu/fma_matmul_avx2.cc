// For every processor we run on (x86-64-v3). 16 registers: a tile of 6 rows x 2 vectors.
#include <immintrin.h>

#include "kernels/cpu/fma_matmul.h"

namespace kvt {
namespace {

struct Simd {
  using V = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kRowsMax = 6;
  static constexpr int kBlockVectors = 2;
  static constexpr int kWideAccumulatorsMax = 8;

  static V Zero() { return _mm256_setzero_ps(); }
  static V Set(float x) { return _mm256_set1_ps(x); }
  static V Load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
  static void Store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static __m256i Mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static V MaskLoad(const float* p, int n) { return _mm256_maskload_ps(p, Mask(n)); }
  static void MaskStore(float* p, V v, int n) { _mm256_maskstore_ps(p, Mask(n), v); }
  static V Broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static V Fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V Add(V a, V b) { return _mm256_add_ps(a, b); }
  static V Mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm256_div_ps(a, b); }
  static V Negate(V a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static void LoadPair(const uint8_t* p, V* low, V* high) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    *low = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
    *high = _mm256_castsi256_ps(
        _mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  // As in fma_matmul_avx512.cc.
  static V Exp(V x) {
    x = _mm256_min_ps(Set(88.0f), _mm256_max_ps(Set(-87.0f), x));
    const V n = _mm256_round_ps(_mm256_mul_ps(x, Set(1.44269504f)),
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    V r = _mm256_fnmadd_ps(n, Set(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, Set(-2.12194440e-4f), r);
    V y = Set(1.9875691500e-4f);
    y = Fma(y, r, Set(1.3981999507e-3f));
    y = Fma(y, r, Set(8.3334519073e-3f));
    y = Fma(y, r, Set(4.1665795894e-2f));
    y = Fma(y, r, Set(1.6666665459e-1f));
    y = Fma(y, r, Set(5.0000001201e-1f));
    y = Fma(y, _mm256_mul_ps(r, r), _mm256_add_ps(r, Set(1.0f)));
    const __m256i exponent = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(exponent));
  }
  static void StoreBf16(uint16_t* p, V v, int n) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 ordered = _mm256_cmp_ps(v, v, _CMP_ORD_Q);
    rounded = _mm256_blendv_epi8(_mm256_set1_epi32(0x7fc00000), rounded,
                                 _mm256_castps_si256(ordered));
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), _mm256_srli_epi32(rounded, 16));
    for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(lanes[i]);
  }
};

}  // namespace
}  // namespace kvt

#include "kernels/cpu/fma_matmul_impl.h"

namespace kvt {

// Enough for either instruction set.
size_t FmaMatmulWorkspaceBytes(int channels, int rows, int members) {
  const size_t panel_bytes =
      static_cast<size_t>(MinInt(EvenChannels(channels), kPanelChannelsMax)) * kFmaBlockColumns *
      4 * 2;
  const size_t row_bytes = static_cast<size_t>(Chunks(channels)) * kTileStride * 4;
  const size_t rows_in_cache = kTileBytesMax / (static_cast<size_t>(channels) * 4);
  size_t held = static_cast<size_t>(rows) < rows_in_cache ? static_cast<size_t>(rows)
                                                          : rows_in_cache;
  if (held < 14) held = 14;
  const size_t member = panel_bytes + (held + held / Simd::kRowsMax + 14) * row_bytes;
  return (member + 63) / 64 * 64 * static_cast<size_t>(members);
}

void FmaMatmulAvx2(const FmaMatmulArgs& args, int member, int members) {
  RunMember(args, member, members);
}

}  // namespace kvt
