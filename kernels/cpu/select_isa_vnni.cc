// Scores with AVX-512 and VNNI's byte dot product.
#include "kernels/cpu/select_impl.h"
#include "kernels/cpu/select_isa_avx512.h"

namespace kvt {
namespace {

struct ScoreVnni : ScoreAvx512 {
  static I DotPair(I acc, B a, B b, const int8_t* q) {
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(acc, a, Broadcast4(q)), b, Broadcast4(q + 4));
  }
};

}  // namespace

const ScoreIsa kScoreIsaVnni = {"avx512vnni", &Logits<ScoreVnni>, &Score<ScoreVnni>,
                                &Combine<ScoreVnni>};

}  // namespace kvt
