// Scores with AVX-512.
#include "kernels/cpu/select_impl.h"
#include "kernels/cpu/select_isa_avx512.h"

namespace kvt {

const ScoreIsa kScoreIsaAvx512 = {"avx512", &Logits<ScoreAvx512>, &Score<ScoreAvx512>,
                                  &Combine<ScoreAvx512>};

}  // namespace kvt
