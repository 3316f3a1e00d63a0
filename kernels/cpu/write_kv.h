// KV write on the CPU (arguments: kernels/paged_kv.h): f32 rows of K (after rope) and V are rounded
// once to fp16 and stored as two byte planes in the slots of their positions.
//
// Called by every member of the thread team with its own `thread` in [0, threads); the work is
// divided statically by (block, KV head). Every block written must be TARGET (both slots). Returns
// what this thread saturated and how many NaN it met; the caller adds the results up. Moves
// 8 bytes in and 4 bytes out a value pair; bound by memory. No allocation.
#pragma once

#include "kernels/paged_kv.h"

namespace kvt {

[[nodiscard]] WriteKvResult CpuWriteKv(const WriteKvArgs& args, int thread, int threads);

}  // namespace kvt
