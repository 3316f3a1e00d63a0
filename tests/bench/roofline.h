// What this machine reaches in the same run: multiply-adds and memory reads, on `threads` threads.
#pragma once

namespace kvt {

// f32 fused multiply-adds in registers, GFLOP/s.
double PeakF32Gflops(int threads);
// bf16 dot products (vdpbf16ps) in registers, GFLOP/s; 0 where the processor has none.
double PeakBf16Gflops(int threads);
// Reads of a buffer larger than the caches share, GB/s.
double PeakReadGbps(int threads);

}  // namespace kvt
