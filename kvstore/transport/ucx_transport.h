// The data plane over UCX active messages: TCP here, RDMA elsewhere by UCX's own choice. One UCP
// worker and one thread per transport or server, asleep when idle. How it works: ucx_messages.h.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/transport/transport.h"
#include "kvstore/transport/transport_server.h"

namespace kvt {

struct UcxOptions {
  // UCX_TLS: "tcp", "all". Empty: UCX chooses.
  std::string tls;
  // UCX_NET_DEVICES: "lo", "eth0", "mlx5_0:1". Empty: all.
  std::string net_devices;
  // CPU the thread is bound to; -1: none. For benchmarks.
  int cpu = -1;
  // How long the thread polls after the last event before it sleeps. It saves the sleeps within a
  // burst (on a virtual machine each costs more than the poll: processor time per byte falls too)
  // and costs nothing when idle. At most 1 s.
  absl::Duration poll_before_sleep = absl::Microseconds(50);
  // What this end claims to speak. For tests.
  TransportVersions versions{};

  [[nodiscard]] absl::Status Validate() const;
};

struct UcxServerOptions {
  UcxOptions ucx;
  // Numeric IPv4 or IPv6 address the listener binds to, and the port (0: a free one).
  std::string host = "127.0.0.1";
  int port = 0;
};

// Unavailable, ResourceExhausted (locked-memory limit), InvalidArgument (no such device): cause and
// remedy in the message.
absl::StatusOr<std::unique_ptr<Transport>> MakeUcxTransport(const UcxOptions& options);

// `arena` is the memory that pulls are sent from and pushes are written to.
absl::StatusOr<std::unique_ptr<TransportServer>> StartUcxServer(const UcxServerOptions& options,
                                                                absl::Span<std::byte> arena,
                                                                PieceResolver& resolver);

}  // namespace kvt
