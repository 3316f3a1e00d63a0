// What UCX finds on this host: transports and devices, and whether a configuration names ones that
// exist. UCX itself only warns of a device that it does not know and goes on without it. Stateless;
// thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvt {

struct UcxDevice {
  std::string transport;  // "tcp", "rc_mlx5", "posix", "cuda_copy"
  std::string device;     // "lo", "mlx5_0:1", "memory"
  bool network = false;
};

// In UCX's order; opens every memory domain (milliseconds). Unavailable.
absl::StatusOr<std::vector<UcxDevice>> ListUcxDevices();

// The transport needs registered, locked memory: InfiniBand and its kin.
bool NeedsLockedMemory(absl::string_view transport);

// InvalidArgument when `net_devices` (UCX_NET_DEVICES: "all", names by comma, a leading '^' excludes)
// names a network device that is not in `devices`; the message lists those that are.
absl::Status CheckNetDevices(const std::vector<UcxDevice>& devices, absl::string_view net_devices);

}  // namespace kvt
