// The [tier] table of a worker's configuration: how it reaches the stores.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/options.h"

namespace kvt {

// Which data plane carries bursts. kAuto: shared memory when worker and store share a host and both
// offer it, else UCX.
enum class TierTransport : uint8_t { kAuto = 0, kUcx = 1, kShm = 2 };

struct ClientOptions {
  TierTransport transport = TierTransport::kAuto;
  // Pulled slices are compared with the checksums that lookup gave; a difference is a lost block.
  // Off for benchmarks and for the test that shows what they protect from.
  bool verify_checksums = true;
  // UCX_NET_DEVICES and UCX_TLS of this process; empty: UCX chooses.
  std::string ucx_net_devices;
  std::string ucx_tls;
  // Threads that gather from one same-host store's mapping; 1 to 8. One saturates about half of a
  // small machine's memory; more take processors away from the model.
  int shm_gather_threads = 1;
  // Control calls (session, lookup, reserve, seal) end by then with Unavailable or DeadlineExceeded.
  absl::Duration control_timeout = absl::Seconds(2);
  // What Lookup waits for at most; a store that has not answered counts as having nothing.
  absl::Duration lookup_timeout = absl::Seconds(1);
  // A transfer that has not landed by then, and 1 s more for each 64 MiB of it, is lost, and its
  // channel is closed and opened again.
  absl::Duration transfer_timeout = absl::Seconds(5);
  // Connecting and attaching a data channel.
  absl::Duration connect_timeout = absl::Seconds(2);
  // Consecutive failures after which a store is skipped, and how long until it is probed again; the
  // pause doubles up to the maximum.
  int breaker_failures = 2;
  absl::Duration breaker_pause = absl::Milliseconds(250);
  absl::Duration breaker_pause_max = absl::Seconds(5);
  // Threads of the CallPool: as many stores are asked at once.
  int control_threads = 4;
  // File with the secret that keys block names (64 hexadecimal digits or any bytes; trailing white
  // space is dropped). Must be readable by its owner alone. All workers of a cluster have the same.
  std::string cluster_secret_file;
};

// Reads the table; problems are collected in its file and reported by OptionsFile::Finish().
ClientOptions ReadClientOptions(OptionsTable table);

// The secret's bytes. NotFound with the path; PermissionDenied when group or others may read it;
// InvalidArgument when it is shorter than 16 bytes or longer than 1 KiB.
absl::StatusOr<std::string> ReadClusterSecret(const std::string& path);

}  // namespace kvt
