// Digests, scores and top blocks on the CPU (arguments: kernels/selection.h). Called by every member
// of the team; work is shared.
//
// Scores go in two phases with a barrier between them. Phase 1 leaves, for every query and burst of
// blocks, the largest logit and each block's sum of exponentials below it; phase 2 joins them over the
// bursts of a row. Members share bursts, so the result of a row depends on its own inputs alone,
// whatever the threads and the batch.
#pragma once

#include <cstddef>

#include "kernels/cpu/select_task.h"
#include "kernels/cpu/thread_team.h"
#include "kernels/cpu/workspace.h"
#include "kernels/selection.h"

namespace kvt {

// The spec fits the geometry, and both fit here.
void CheckDigestSpec(const Geometry& geometry, const DigestSpec& spec);

void CpuMakeDigest(const MakeDigestArgs& args, TeamMember& member);

[[nodiscard]] size_t CpuScoreWorkspaceBytes(int queries, int rows, int blocks);
void CpuScoreBlocks(const ScoreBlocksArgs& args, Workspace workspace, TeamMember& member);
void CpuScoreBlocksCombine(const ScoreBlocksArgs& args, Workspace workspace, TeamMember& member);

[[nodiscard]] size_t CpuSelectWorkspaceBytes(int rows, int blocks);
void CpuSelectTopBlocks(const SelectTopBlocksArgs& args, Workspace workspace, TeamMember& member);

// Test hook, not thread-safe with running operations: the implementations of scoring that this
// processor can run, best first, and the choice of one (0 is the default).
[[nodiscard]] int CpuScoreIsaCount();
[[nodiscard]] const ScoreIsa& CpuScoreIsaAt(int index);
void CpuScoreUseIsa(int index);

}  // namespace kvt
