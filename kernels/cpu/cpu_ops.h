// kernels/ops.h on the CPU device: chooses implementations and enqueues them on CpuStreams.
#pragma once

#include <memory>

#include "kernels/device.h"
#include "kernels/ops.h"

namespace kvt {

// `device` is the CPU device that owns the result; `threads` its team's size.
[[nodiscard]] std::unique_ptr<Ops> MakeCpuOps(Device& device, int threads);

}  // namespace kvt
