// Scores with AVX2 and FMA: what every processor of the default build has.
#include "kernels/cpu/attention_isa_avx2.h"
#include "kernels/cpu/select_impl.h"

namespace kvt {
namespace {

struct ScoreArch : Avx2 {
  static V FromBytes(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)))};
  }
};

}  // namespace

const ScoreIsa kScoreIsaAvx2 = {"avx2", &ScoreBlock<ScoreArch>, &CombineParts<ScoreArch>};

}  // namespace kvt
