// The CPU as an asynchronous Device. One executor thread drains all streams by priority, operation
// by operation; it is member 0 of the one thread team that all kernels and oneDNN share. The team
// spins for some microseconds between the operations of a step and then sleeps: an idle process
// uses no processor time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/device.h"

namespace kvt {

// Times every operation on the executor thread, for benchmarks.
enum class CpuProfile : uint8_t {
  kOff,
  kWall,
  kThreadTime,  // processor time of the executor: for machines that are not quiet, with one thread
};

struct CpuDeviceOptions {
  // Team members, the executor among them; in [1, kTeamThreadsMax]. 0: all processors this process
  // may run on.
  int threads = 0;
  // Bind member i to the i-th permitted processor. For benchmarks: pinned workers that share
  // processors starve one another.
  bool pin = false;
  // How long a member looks for the next operation before it sleeps. [0, 1 ms].
  absl::Duration spin = absl::Microseconds(20);
  CpuProfile profile = CpuProfile::kOff;
};
inline constexpr int kTeamThreadsMax = 256;

// InvalidArgument for an option out of range. Outlives everything made from it.
[[nodiscard]] absl::StatusOr<std::unique_ptr<Device>> MakeCpuDevice(const CpuDeviceOptions& options);

// What a profiled CPU device spent by kind of operation since the last call, most time first. Call
// with all streams drained.
struct CpuOpTime {
  std::string name;
  uint64_t calls = 0;
  absl::Duration time;
};
[[nodiscard]] std::vector<CpuOpTime> TakeCpuProfile(Device& device);

}  // namespace kvt
