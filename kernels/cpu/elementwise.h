// The small operations of the CPU: embedding, norms, biases, rope. Called by every member; rows are
// shared statically. Bound by memory; each row is computed by one member in a fixed order.
#pragma once

#include "kernels/cpu/thread_team.h"
#include "kernels/ops.h"

namespace kvt {

void CpuEmbed(const EmbedArgs& args, TeamMember& member);
void CpuRmsNorm(const RmsNormArgs& args, TeamMember& member);
void CpuAddBias(const AddBiasArgs& args, TeamMember& member);
void CpuNormHeads(const NormHeadsArgs& args, TeamMember& member);
void CpuRope(const RopeArgs& args, TeamMember& member);

// out[i] = silu(gate[i]) * up[i] as act, for results that were not finished in registers.
void CpuSwiGluRow(const float* gate, const float* up, int width, ComputeType out_type, void* out);

}  // namespace kvt
