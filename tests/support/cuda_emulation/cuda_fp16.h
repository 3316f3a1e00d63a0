// Stands for CUDA's own where its sources are compiled for the host (cuda_emulation.h).
#pragma once

#include "kernels/layout/planes.h"

struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half half) { return kvt::HalfToFloat(half.bits); }
