// Compiled for AVX-512 with bf16; called only where HasPeakLoops().
#include "tests/bench/attention_peak.h"

#include <immintrin.h>

namespace kvt {

bool HasPeakLoops() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
}

// 24 independent accumulators in registers by name: an array of __m512 would live in memory.
#define KVT_REPEAT_24(X) \
  X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) \
  X(17) X(18) X(19) X(20) X(21) X(22) X(23)
#define KVT_STRING(x) #x
#define KVT_DOT(i) "vdpbf16ps %%zmm31, %%zmm31, %%zmm" KVT_STRING(i) "\n"
#define KVT_FMA(i) "vfmadd231ps %%zmm31, %%zmm31, %%zmm" KVT_STRING(i) "\n"
#define KVT_CLEAR(i) "vpxord %%zmm" KVT_STRING(i) ", %%zmm" KVT_STRING(i) ", %%zmm" KVT_STRING(i) "\n"
#define KVT_CLOBBERS                                                                          \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",    \
      "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", \
      "xmm21", "xmm22", "xmm23", "xmm31"

double PeakDotBf16(long iterations) {
  const auto done = static_cast<double>(iterations);
  asm volatile("vpbroadcastd %1, %%zmm31\n" KVT_REPEAT_24(KVT_CLEAR) "1:\n" KVT_REPEAT_24(KVT_DOT)
               "dec %0\n jnz 1b\n"
               : "+r"(iterations) : "r"(0x3f003f00) : KVT_CLOBBERS, "cc");
  return done * 24 * 64;
}

double PeakFmaF32(long iterations) {
  const auto done = static_cast<double>(iterations);
  asm volatile("vpbroadcastd %1, %%zmm31\n" KVT_REPEAT_24(KVT_CLEAR) "1:\n" KVT_REPEAT_24(KVT_FMA)
               "dec %0\n jnz 1b\n"
               : "+r"(iterations) : "r"(0x3f000000) : KVT_CLOBBERS, "cc");
  return done * 24 * 32;
}

uint64_t ReadAll(const uint8_t* data, size_t bytes) {
  __m512i sum0 = _mm512_setzero_si512();
  __m512i sum1 = sum0;
  for (size_t i = 0; i + 128 <= bytes; i += 128) {
    sum0 = _mm512_add_epi64(sum0, _mm512_load_si512(data + i));
    sum1 = _mm512_add_epi64(sum1, _mm512_load_si512(data + i + 64));
  }
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(sum0, sum1)));
}

}  // namespace kvt
