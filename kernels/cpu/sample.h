// Sampling on the CPU (arguments: kernels/ops.h). Called by every member; rows are shared.
//
// Greedy: the lowest id among the largest logits. Else logits / temperature, restricted to the
// top_k largest (ties by lower id), then to the shortest prefix in falling order whose probability
// reaches top_p, then drawn with CounterUniform(seed, position). top_p without top_k looks at the
// kTopKMax likeliest, with probabilities over the whole vocabulary.
#pragma once

#include <cstddef>

#include "kernels/cpu/thread_team.h"
#include "kernels/ops.h"

namespace kvt {

[[nodiscard]] size_t CpuSampleWorkspaceBytes(int rows, int vocabulary);
void CpuSample(const SampleArgs& args, TeamMember& member);

}  // namespace kvt
