#include "kvstore/wire/rpc_support.h"

#include <grpc/grpc.h>
#include <grpcpp/resource_quota.h>

#include <chrono>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/limits.h"

namespace kvt::rpc {
namespace {

constexpr char kOriginKey[] = "kvtide-origin";

// gRPC 1.51 reads errno of connect() after calls that may have changed it, so that a connection in
// progress is now and then taken for a failed one, with an error that no connect() over TCP gives. The
// call has not been sent then.
constexpr absl::string_view kLateErrno = "No such file or directory";
constexpr absl::string_view kNotConnected = "failed to connect to all addresses";
constexpr int kConnectAttemptsMax = 3;
// The window of a stream. Fixed: gRPC would otherwise probe the path with pings for as long as calls come,
// several a second and connection, which is most of what an idle cluster costs.
constexpr int kWindowBytes = 1 << 20;
constexpr auto kConnectAgainWait = std::chrono::milliseconds(500);

class Server final : public RpcServer {
 public:
  // Registers with `builder`, which starts afterwards.
  Server(std::unique_ptr<grpc::Service> service, grpc::ServerBuilder& builder)
      : service_(std::move(service)), health_(MakeHealthService(ready_)) {
    builder.RegisterService(service_.get());
    builder.RegisterService(health_.get());
  }
  ~Server() override { Shutdown(absl::Milliseconds(500)); }

  void Started(std::unique_ptr<grpc::Server> server, int port) {
    server_ = std::move(server);
    port_ = port;
  }
  int port() const override { return port_; }
  void SetReady(bool ready) override { ready_.store(ready); }

  void Shutdown(absl::Duration grace) override {
    if (server_ == nullptr) return;
    server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(grace));
    server_->Wait();
    server_.reset();
  }

 private:
  std::atomic<bool> ready_{true};
  std::unique_ptr<grpc::Service> service_;  // outlives the server
  std::unique_ptr<grpc::Service> health_;   // outlives the server
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace

grpc::Status ToGrpc(const absl::Status& status, grpc::ServerContext* context) {
  context->AddTrailingMetadata(kOriginKey, "1");
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  if (message.size() > kErrorMessageBytesMax) {
    message.resize(kErrorMessageBytesMax);
    message += "...";
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), message);
}

absl::Status FromGrpc(const grpc::Status& status, const grpc::ClientContext& context,
                      absl::string_view peer) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  const auto& trailers = context.GetServerTrailingMetadata();
  if (trailers.find(kOriginKey) != trailers.end()) return absl::Status(code, status.error_message());
  // Nobody here cancels a call whose end is asked for: it reached a server that is stopping.
  if (code == absl::StatusCode::kCancelled) {
    return absl::UnavailableError(absl::StrCat(peer, ": it is stopping"));
  }
  return absl::Status(code, absl::StrCat(peer, ": ", status.error_message()));
}

Peer::Peer(absl::string_view what, absl::string_view address, absl::Duration timeout)
    : name_(absl::StrCat(what, " at ", address)), timeout_(timeout) {
  KVT_CHECK(timeout > absl::ZeroDuration());
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kControlMessageBytesMax);
  arguments.SetMaxSendMessageSize(kControlMessageBytesMax);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
  // A node that comes back on its port is found soon; a peer of this process is not shared with
  // another stub's backoff; cluster traffic takes no proxy.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetServiceConfigJSON("{}");
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  channel_ = grpc::CreateCustomChannel(std::string(address), grpc::InsecureChannelCredentials(),
                                       arguments);
}

bool Peer::ConnectAgain(const grpc::Status& status, int attempt) const {
  if (status.error_code() != grpc::StatusCode::UNAVAILABLE || attempt >= kConnectAttemptsMax ||
      !absl::StartsWith(status.error_message(), kNotConnected) ||
      !absl::StrContains(status.error_message(), kLateErrno)) {
    return false;
  }
  channel_->WaitForConnected(std::chrono::system_clock::now() + kConnectAgainWait);
  return true;
}

void Peer::SetDeadline(grpc::ClientContext* context) const {
  context->set_deadline(std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout_));
}

absl::StatusOr<std::unique_ptr<RpcServer>> StartServer(std::unique_ptr<grpc::Service> service,
                                                       absl::string_view what,
                                                       absl::string_view address) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(std::string(address), grpc::InsecureServerCredentials(), &port);
  auto running = std::make_unique<Server>(std::move(service), builder);
  builder.SetMaxReceiveMessageSize(kControlMessageBytesMax);
  builder.SetMaxSendMessageSize(kControlMessageBytesMax);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
  grpc::ResourceQuota quota(std::string(what) + "-server");
  quota.SetMaxThreads(kServerThreadsMax);
  builder.SetResourceQuota(quota);
  // Two daemons on one port would share it silently otherwise.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kKeepaliveTimeMs / 2);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  // A client that vanished frees its stream's thread.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A caller ends its call at its deadline; a timer here would only be set, cancelled and waited for.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_DEADLINE_CHECKS, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kWindowBytes);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, " (", what,
                                               "): the port is taken or the address is not ours"));
  }
  running->Started(std::move(server), port);
  return std::unique_ptr<RpcServer>(std::move(running));
}

}  // namespace kvt::rpc
