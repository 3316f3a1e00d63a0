// Digests, scores and top blocks on the CPU (arguments: kernels/selection.h). Called by every member
// of the team; work is shared.
//
// Scores go in two phases with a barrier between them. Phase 1 leaves, for every query and block, the
// largest logit and the sum of exponentials below it; phase 2 joins them over the blocks of a row.
// The result of a row depends on its own inputs alone, whatever the threads and the batch.
#pragma once

#include <cstddef>

#include "absl/strings/string_view.h"
#include "kernels/cpu/thread_team.h"
#include "kernels/cpu/workspace.h"
#include "kernels/selection.h"

namespace kvt {

void CpuMakeDigest(const MakeDigestArgs& args, TeamMember& member);

[[nodiscard]] size_t CpuScoreWorkspaceBytes(int queries, int rows, int blocks);
void CpuScoreBlocks(const ScoreBlocksArgs& args, Workspace workspace, TeamMember& member);
void CpuScoreBlocksCombine(const ScoreBlocksArgs& args, Workspace workspace, TeamMember& member);

[[nodiscard]] size_t CpuSelectWorkspaceBytes(int rows, int blocks);
void CpuSelectTopBlocks(const SelectTopBlocksArgs& args, Workspace workspace, TeamMember& member);

// Test hook, not thread-safe with running operations: the implementations of scoring that this
// processor can run, best first, and the choice of one (0 is the default).
[[nodiscard]] int CpuScoreIsaCount();
[[nodiscard]] absl::string_view CpuScoreIsaName(int index);
void CpuScoreUseIsa(int index);

}  // namespace kvt
