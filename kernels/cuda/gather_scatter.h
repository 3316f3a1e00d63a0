// Gather and scatter of slots on a CUDA device (arguments and precondition checks:
// kernels/slot_burst.h). All pointers are device addresses. Each slot image is copied by one thread
// block in pieces of 16 bytes; 2 * count * slot_bytes bytes move, bound by device memory. A slot id
// at or beyond slot_count traps, which shows as the device's sticky failure.
//
// Enqueued on `stream`, a cudaStream_t; the arguments' lists are read when the kernel runs. Returns
// InvalidArgument for a broken precondition and Internal when the launch is refused.
#pragma once

#include "absl/status/status.h"
#include "kernels/slot_burst.h"

struct CUstream_st;

namespace kvt {

[[nodiscard]] absl::Status CudaGatherSlots(const GatherSlotsArgs& args, CUstream_st* stream);
// Writes the table entries too; work enqueued on the stream later sees bytes and entries.
[[nodiscard]] absl::Status CudaScatterSlots(const ScatterSlotsArgs& args, CUstream_st* stream);

}  // namespace kvt
