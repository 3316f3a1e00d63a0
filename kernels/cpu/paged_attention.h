// Paged attention over byte planes on the CPU (arguments: kernels/paged_kv.h).
//
// Two phases, each called by every member of the thread team with its own `thread` in
// [0, threads); the caller puts a barrier between them:
//   1. CpuPagedAttention         computes rows; long contexts of few rows are split over threads,
//                                and their partial results go to the workspace;
//   2. CpuPagedAttentionCombine  joins the partial results. Returns at once where nothing was split.
// `args` and `workspace` are the same in both phases and on every thread. Units of work are divided
// statically. No allocation, no lock; thread-safe for distinct workspaces and outputs.
//
// Numerics (DESIGN 2). A row (position p, one query head) is computed by a fixed sequence:
//   - ranges of kAttentionRangeTokens keys, anchored at position 0, each on its own, in tiles of
//     kAttentionTileTokens keys; within a tile the key blocks (16) up to the row's own;
//   - online softmax over the tiles of a range, then the ranges are merged in order.
// How rows are grouped in registers, chunks, threads or batches does not enter, so a row is the same
// bit for bit whatever runs beside it. Keys after p are selected away and may hold anything.
#pragma once

#include <cstddef>

#include "absl/strings/string_view.h"
#include "kernels/cpu/workspace.h"
#include "kernels/paged_kv.h"

namespace kvt {

inline constexpr int kAttentionTileTokens = 128;
inline constexpr int kAttentionRangeTokens = 512;

// What the workspace must hold.
struct AttentionLimits {
  Geometry geometry;
  int query_heads = 0;
  int threads = 1;
  int decode_rows_max = 1;  // segments of few rows whose context may be split, per step
  int context_tokens_max = 0;
};

// Bytes of the workspace, a multiple of 64. With less room for partial results the work is split
// less and the result is the same; room for the per-thread scratch is required.
[[nodiscard]] size_t CpuPagedAttentionWorkspaceBytes(const AttentionLimits& limits);

void CpuPagedAttention(const PagedAttentionArgs& args, Workspace workspace, int thread,
                       int threads);
void CpuPagedAttentionCombine(const PagedAttentionArgs& args, Workspace workspace, int thread,
                              int threads);
// Whether the second phase has anything to do: if not, it and the barrier may be left out. The same
// on every thread.
[[nodiscard]] bool CpuPagedAttentionIsSplit(const PagedAttentionArgs& args, Workspace workspace,
                                            int threads);

// The implementation chosen once for this process by the processor: "avx512bf16" (operands rounded
// to bf16, f32 sums), "avx512" or "avx2" (f32 products; in bf16 mode too, where they are no slower
// than dot products of bf16). Part of the numerics id.
[[nodiscard]] absl::string_view CpuAttentionIsa(ComputeType compute);

// Test hook, not thread-safe with running attention: the implementations this processor can run for
// `compute`, best first, and the choice of one by index (0 is the default).
[[nodiscard]] int CpuAttentionIsaCount(ComputeType compute);
[[nodiscard]] absl::string_view CpuAttentionIsaName(ComputeType compute, int index);
void CpuAttentionUseIsa(ComputeType compute, int index);

}  // namespace kvt
