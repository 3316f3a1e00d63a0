// The data plane within one process, for tests: the same contract, deterministic, with faults on
// demand. One thread per channel carries bursts out in submission order.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/transport/transport.h"
#include "kvstore/transport/transport_server.h"

namespace kvt {

// Faults of a loopback server; set at any time, by any thread.
class LoopbackFaults {
 public:
  virtual ~LoopbackFaults() = default;
  // The next `pieces` pieces get their first byte flipped on the way.
  virtual void CorruptNext(int pieces) = 0;
  // The next `bursts` bursts are swallowed: they end by their deadline, which closes the channel.
  virtual void DropNext(int bursts) = 0;
  // While true no burst makes progress, as with a stopped peer.
  virtual void SetStalled(bool stalled) = 0;
  // As when the store's process dies: every channel closes, connects fail.
  virtual void Kill() = 0;
};

class LoopbackServer : public TransportServer {
 public:
  virtual LoopbackFaults& Faults() = 0;
};

// AlreadyExists when a server of that name runs in this process.
absl::StatusOr<std::unique_ptr<LoopbackServer>> StartLoopbackServer(
    const std::string& name, PieceResolver& resolver, TransportVersions versions = {});
std::unique_ptr<Transport> MakeLoopbackTransport(TransportVersions versions = {});

}  // namespace kvt
