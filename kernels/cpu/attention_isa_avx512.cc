// Paged attention with AVX-512F: f32 products, and bf16-rounded operands in f32 products where the
// processor lacks AVX512_BF16. Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl.
#include "kernels/cpu/attention_isa_avx512.h"

#include "kernels/cpu/attention_impl.h"

namespace kvt {
namespace {

// 2^f on [-0.5, 0.5] is 1 + f (c0 + f (c1 + ...)), minimax; relative error 7.9e-8 in f32.
struct ArchF32 : Avx512Wide<false> {
  static constexpr float kExp2[] = {6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                                    9.618436918e-03f, 1.339887502e-03f, 1.535336196e-04f};
};
// Relative error 2.9e-6: the weights are rounded to 8 bits afterwards.
struct ArchBf16 : Avx512Wide<true> {
  static constexpr float kExp2[] = {6.931241751e-01f, 2.402409911e-01f, 5.590642616e-02f,
                                    9.582852945e-03f};
};

}  // namespace

const AttentionIsa& AttentionAvx512F32() {
  static constexpr AttentionIsa kIsa = {"avx512", Attention<ArchF32>::Run,
                                        Attention<ArchF32>::Combine};
  return kIsa;
}

const AttentionIsa& AttentionAvx512EmulatedBf16() {
  static constexpr AttentionIsa kIsa = {"avx512-rounded", Attention<ArchBf16>::Run,
                                        Attention<ArchBf16>::Combine};
  return kIsa;
}

}  // namespace kvt
