// Launch of a kernel that takes its parameters as one struct. For kernels/cuda's own sources.
#pragma once

#include <cuda_runtime.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvt {

// Internal, naming `op`, when the launch is refused. A failure of the kernel itself shows later, as
// the device's.
template <typename Params>
[[nodiscard]] absl::Status CudaLaunch(const char* op, void (*kernel)(Params), dim3 grid,
                                      int threads, CUstream_st* stream, const Params& params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(op, ": launch: ", cudaGetErrorString(error)));
}

}  // namespace kvt
