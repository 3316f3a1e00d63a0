// Rooflines for attention_bench: what this machine does at best in the same run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvt {

// Whether this processor has AVX-512 with bf16 dot products.
bool HasPeakLoops();
// Register-only loops on one thread: floating-point operations done.
double PeakDotBf16(long iterations);
double PeakFmaF32(long iterations);
// Reads every cache line; returns something that depends on the data.
uint64_t ReadAll(const uint8_t* data, size_t bytes);

}  // namespace kvt
