// What a link carries at best over UCX: a row of large active messages, many outstanding, with the
// settings, the process pair and the wait mode of the data plane. The ceiling in burst_bench.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/transport/ucx_transport.h"

namespace kvt {

enum class LinkProbeProtocol { kEager, kRendezvous };

struct LinkProbeOptions {
  uint32_t message_bytes = 4 * 1024 * 1024;
  uint32_t messages = 64;
  uint32_t outstanding = 32;
  LinkProbeProtocol protocol = LinkProbeProtocol::kRendezvous;
};

// Sends what clients ask for. Owned by the caller; its destructor stops it.
class UcxLinkProbeServer {
 public:
  virtual ~UcxLinkProbeServer() = default;
  [[nodiscard]] virtual std::string Address() const = 0;
};
absl::StatusOr<std::unique_ptr<UcxLinkProbeServer>> StartUcxLinkProbe(
    const UcxServerOptions& options);

// Thread-safe; one measurement at a time.
class UcxLinkProbe {
 public:
  virtual ~UcxLinkProbe() = default;
  // From the request to the last message's arrival. InvalidArgument (no message, or over 1 GiB
  // outstanding), DeadlineExceeded, Unavailable.
  virtual absl::StatusOr<absl::Duration> Measure(const LinkProbeOptions& options,
                                                 absl::Time deadline) = 0;
};
absl::StatusOr<std::unique_ptr<UcxLinkProbe>> ConnectUcxLinkProbe(const UcxOptions& options,
                                                                  const std::string& address);

}  // namespace kvt
