// Digests, scores and top blocks on a CUDA device (arguments: kernels/selection.h). Results are
// those of the CPU bit for bit (kernels/cuda/select_math.h): logits are exact integers, and sums
// are made in the CPU's order.
//
// Scores go in three launches for every kSelectSegmentsPerLaunch rows. The first reads the digests
// once for each 8 queries of a selecting head: a thread is one token of one of 16 blocks, a word of
// a row is eight dot products of four channels. It leaves each block's sum of exponentials below
// the largest logit of its 16 blocks; the second finds each query's mass over the row, the third
// divides. Bound by device memory: one pass over the digests, and 4.5 bytes per query and block
// written and read again.
//
// Everything is enqueued on `stream`, a cudaStream_t: no allocation, no wait. The lists in host
// memory are read by the call itself. InvalidArgument names a broken precondition, Internal a
// launch that was refused; a block without a slot traps, which shows as the device's sticky
// failure.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "kernels/selection.h"

struct CUstream_st;

namespace kvt {

[[nodiscard]] absl::Status CudaMakeDigest(const MakeDigestArgs& args, CUstream_st* stream);

// For up to so many rows with up to `blocks` blocks each, and `queries` query heads that score.
[[nodiscard]] size_t CudaScoreWorkspaceBytes(int queries, int rows, int blocks);
// `workspace` is device memory, 16-byte aligned.
[[nodiscard]] absl::Status CudaScoreBlocks(const ScoreBlocksArgs& args, void* workspace,
                                           size_t workspace_bytes, CUstream_st* stream);

// Needs no workspace: a thread block finds the rank of the last block taken, eight bits at a time,
// and then writes the indices in order.
[[nodiscard]] absl::Status CudaSelectTopBlocks(const SelectTopBlocksArgs& args,
                                               CUstream_st* stream);

}  // namespace kvt
