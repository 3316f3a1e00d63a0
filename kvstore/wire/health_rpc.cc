// The health check over gRPC: the service beside every daemon's own, and its client.
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/wire/health.grpc.pb.h"
#include "kvstore/wire/rpc_support.h"

namespace kvt {
namespace {

using Health = grpc::health::v1::Health;
using Request = grpc::health::v1::HealthCheckRequest;
using Response = grpc::health::v1::HealthCheckResponse;

constexpr char kLive[] = "live";
constexpr char kReady[] = "ready";

class HealthService final : public Health::Service {
 public:
  explicit HealthService(const std::atomic<bool>& ready) : ready_(ready) {}

  grpc::Status Check(grpc::ServerContext*, const Request* request, Response* response) override {
    const std::string& service = request->service();
    if (service == kLive) {
      response->set_status(Response::SERVING);
    } else if (service.empty() || service == kReady) {
      response->set_status(ready_.load() ? Response::SERVING : Response::NOT_SERVING);
    } else {
      return grpc::Status(grpc::StatusCode::NOT_FOUND, "known services: \"live\", \"ready\", \"\"");
    }
    return grpc::Status::OK;
  }

 private:
  const std::atomic<bool>& ready_;
};

}  // namespace

namespace rpc {
std::unique_ptr<grpc::Service> MakeHealthService(const std::atomic<bool>& ready) {
  return std::make_unique<HealthService>(ready);
}
}  // namespace rpc

absl::StatusOr<NodeHealth> CheckHealth(absl::string_view address, absl::Duration timeout) {
  const rpc::Peer peer("node", address, timeout);
  Health::Stub stub(peer.channel());
  const auto ask = [&](const char* service, Response* response) {
    Request request;
    request.set_service(service);
    return peer.Call(stub, &Health::Stub::Check, request, response);
  };
  Response live;
  KVT_RETURN_IF_ERROR(ask(kLive, &live));
  if (live.status() != Response::SERVING) {
    return absl::UnavailableError(absl::StrCat("node at ", address, " is not live"));
  }
  Response ready;
  KVT_RETURN_IF_ERROR(ask(kReady, &ready));
  return ready.status() == Response::SERVING ? NodeHealth::kReady : NodeHealth::kLiveNotReady;
}

}  // namespace kvt
