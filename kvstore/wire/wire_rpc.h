// gRPC behind plain interfaces: client stubs, and servers that expose an implementation. gRPC and
// generated messages stay in this folder's .cc files. All stubs are thread-safe; every call has a
// deadline; a dead peer is Unavailable naming the peer.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/store_api.h"
#include "kvstore/wire/worker_api.h"

namespace kvt {

// A running gRPC server; stops (deadline for running calls, then cancels) on destruction.
class RpcServer {
 public:
  virtual ~RpcServer() = default;
  [[nodiscard]] virtual int port() const = 0;
  // What the health check answers for readiness; true until set. Thread-safe.
  virtual void SetReady(bool ready) = 0;
  // Refuses new calls, cancels what runs after `grace`, joins.
  virtual void Shutdown(absl::Duration grace) = 0;
};

// Each serves `api` (borrowed, must outlive the server) on "host:port"; port 0 picks a free one.
// Unavailable when the address cannot be bound.
absl::StatusOr<std::unique_ptr<RpcServer>> ServeStore(StoreApi& api, absl::string_view address);
absl::StatusOr<std::unique_ptr<RpcServer>> ServeCoordinator(CoordinatorApi& api, absl::string_view address);
absl::StatusOr<std::unique_ptr<RpcServer>> ServePrefill(PrefillApi& api, absl::string_view address);
absl::StatusOr<std::unique_ptr<RpcServer>> ServeDecode(DecodeApi& api, absl::string_view address);

// `timeout` bounds each unary call. Streaming calls (Submit, Attach) run until they end, the peer is
// gone (keepalive: at most 10 s), or the sink returns false.
std::unique_ptr<StoreApi> ConnectStore(absl::string_view address, absl::Duration timeout);
std::unique_ptr<CoordinatorApi> ConnectCoordinator(absl::string_view address, absl::Duration timeout);
std::unique_ptr<PrefillApi> ConnectPrefill(absl::string_view address, absl::Duration timeout);
std::unique_ptr<DecodeApi> ConnectDecode(absl::string_view address, absl::Duration timeout);

// The standard gRPC health check (grpc.health.v1) that every control port answers: service "live" is
// SERVING as long as the process answers, service "" and "ready" only while it is ready.
enum class NodeHealth : uint8_t { kReady = 0, kLiveNotReady = 1 };
absl::StatusOr<NodeHealth> CheckHealth(absl::string_view address, absl::Duration timeout);

}  // namespace kvt
