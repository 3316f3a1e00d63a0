// A CUDA device behind kernels/device.h: memory, streams, events and mailboxes over the CUDA
// runtime. Host callbacks and mailbox posts are host functions of the stream; a wait on the host is a
// condition variable that such a function signals, so it sleeps and keeps its deadline. A failed call
// or kernel shows in Health() and stays.
//
// The operations of the model have no CUDA implementation yet: ops() is a bug to call, and workers
// refuse this backend. Gather and scatter of slots (gather_scatter.h) and the choice of blocks for
// sparse attention (select_blocks.h) exist as functions of a stream.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device.h"

struct CUstream_st;

namespace kvt {

// Devices that the driver offers; 0 with the cause in `*why` (which may be null) where there is none.
[[nodiscard]] int CudaDeviceCount(std::string* why);

// NotFound when there is no device of this index, with the driver's reason. Outlives everything made
// from it.
[[nodiscard]] absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int index);

// The runtime's handle of a stream made by a CUDA device.
[[nodiscard]] CUstream_st* CudaStreamHandle(Stream& stream);

}  // namespace kvt
