// What every stub and server of this folder shares: channels, deadlines, statuses, message limits,
// bounded threads. Private to kvstore/wire's .cc files (it includes gRPC).
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/service_type.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt::rpc {

// Threads of one server; a call beyond them is refused with ResourceExhausted. A streaming call
// (Submit, Attach) holds one while it runs.
inline constexpr int kServerThreadsMax = 192;
// A peer that does not answer is found dead within the sum of the two (wire_rpc.h: at most 10 s).
inline constexpr int kKeepaliveTimeMs = 5000;
inline constexpr int kKeepaliveTimeoutMs = 4000;
// Error messages travel in HTTP/2 trailers, which are small.
inline constexpr size_t kErrorMessageBytesMax = 3072;

// A status that a served implementation returned, marked as such, so that the other side can tell it
// from a broken connection.
grpc::Status ToGrpc(const absl::Status& status, grpc::ServerContext* context);

// "coordinator at 10.0.0.1:7000: connection refused" unless the implementation at the other side
// said it: then the message is as it was.
absl::Status FromGrpc(const grpc::Status& status, const grpc::ClientContext& context,
                      absl::string_view peer);

// The client's end: one channel to one peer. Thread-safe.
class Peer {
 public:
  // `what`: "coordinator", "store", ...
  Peer(absl::string_view what, absl::string_view address, absl::Duration timeout);
  [[nodiscard]] const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // A unary call under the deadline.
  template <typename Stub, typename Request, typename Reply>
  absl::Status Call(Stub& stub,
                    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) const {
    for (int attempt = 1;; ++attempt) {
      grpc::ClientContext context;
      SetDeadline(&context);
      const grpc::Status status = (stub.*method)(&context, request, reply);
      if (!ConnectAgain(status, attempt)) return FromGrpc(status, context, name_);
    }
  }

  // A server stream without deadline; `open(&context)` starts it. As Drain below.
  template <typename Open, typename Event, typename Sink>
  absl::Status Stream(const Open& open, Event* event, const Sink& sink) const {
    for (int attempt = 1;; ++attempt) {
      grpc::ClientContext context;
      const auto reader = open(&context);
      grpc::Status ended;
      const absl::Status status = Drain(context, *reader, event, sink, &ended);
      if (!ConnectAgain(ended, attempt)) return status;
    }
  }

  // Ends when `sink(event)` returns false, which is OK. `ended`: how the call itself ended, if it did.
  template <typename Reader, typename Event, typename Sink>
  absl::Status Drain(grpc::ClientContext& context, Reader& reader, Event* event, const Sink& sink,
                     grpc::Status* ended) const {
    while (reader.Read(event)) {
      const absl::StatusOr<bool> more = sink(*event);
      if (more.ok() && *more) continue;
      context.TryCancel();
      while (reader.Read(event)) {
      }
      (void)reader.Finish();
      return more.status();
    }
    *ended = reader.Finish();
    return FromGrpc(*ended, context, name_);
  }

 private:
  // True when the call was never sent because of a connection that did not truly fail, and a moment
  // was waited for another: see kLateErrno.
  bool ConnectAgain(const grpc::Status& status, int attempt) const;
  void SetDeadline(grpc::ClientContext* context) const;

  std::string name_;  // "coordinator at 127.0.0.1:7000"
  absl::Duration timeout_;
  std::shared_ptr<grpc::Channel> channel_;
};

// The health check's service; `ready` is borrowed and outlives it.
std::unique_ptr<grpc::Service> MakeHealthService(const std::atomic<bool>& ready);

// Binds `address`, serves `service` and the health check. `what` as above.
absl::StatusOr<std::unique_ptr<RpcServer>> StartServer(std::unique_ptr<grpc::Service> service,
                                                       absl::string_view what,
                                                       absl::string_view address);

}  // namespace kvt::rpc
