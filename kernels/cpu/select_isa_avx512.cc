// Scores with AVX-512.
#include "kernels/cpu/attention_isa_avx512.h"
#include "kernels/cpu/select_impl.h"

namespace kvt {
namespace {

struct ScoreArch : Avx512 {
  static V FromBytes(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
};

}  // namespace

const ScoreIsa kScoreIsaAvx512 = {"avx512", &ScoreBlock<ScoreArch>, &CombineParts<ScoreArch>};

}  // namespace kvt
