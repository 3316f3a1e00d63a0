// The CPU as an asynchronous Device. One executor thread drains all streams by priority, operation
// by operation; it is member 0 of the one thread team that all kernels and oneDNN share. The team
// spins for some microseconds between the operations of a step and then sleeps: an idle process
// uses no processor time.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device.h"

namespace kvt {

struct CpuDeviceOptions {
  // Team members, the executor among them; in [1, kTeamThreadsMax]. 0: all processors this process
  // may run on.
  int threads = 0;
  // Bind member i to the i-th permitted processor. For benchmarks: pinned workers that share
  // processors starve one another.
  bool pin = false;
  // How long a member looks for the next operation before it sleeps. [0, 1 ms].
  absl::Duration spin = absl::Microseconds(20);
};
inline constexpr int kTeamThreadsMax = 256;

// InvalidArgument for an option out of range. Outlives everything made from it.
[[nodiscard]] absl::StatusOr<std::unique_ptr<Device>> MakeCpuDevice(const CpuDeviceOptions& options);

}  // namespace kvt
