// Paged attention with AVX2, FMA and F16C: what every processor of the default build has. f32
// products.
#include "kernels/cpu/attention_isa_avx2.h"

#include "kernels/cpu/attention_impl.h"

namespace kvt {

const AttentionIsa& AttentionAvx2() {
  static constexpr AttentionIsa kIsa = {"avx2", Attention<Avx2>::Run, Attention<Avx2>::Combine};
  return kIsa;
}

}  // namespace kvt
