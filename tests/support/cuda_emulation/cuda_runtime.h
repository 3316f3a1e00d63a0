// Stands for CUDA's own where its sources are compiled for the host (cuda_emulation.h).
#pragma once

#include "tests/support/cuda_emulation/cuda_emulation.h"

struct CUstream_st;

enum cudaError_t { cudaSuccess = 0 };
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  CUstream_st* stream = nullptr;
};
// Runs the kernel at once.
template <typename Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params),
                               const Params& params) {
  kvt::cuda_emulation::Launch(config->gridDim, config->blockDim.x, [&] { kernel(params); });
  return cudaSuccess;
}
