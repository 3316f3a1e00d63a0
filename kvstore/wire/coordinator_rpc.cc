// CoordinatorApi over gRPC: the client stub and the server around an implementation.
#include <utility>

#include "kernels/base/check.h"
#include "kvstore/wire/coordinator.grpc.pb.h"
#include "kvstore/wire/coordinator_convert.h"
#include "kvstore/wire/rpc_support.h"

namespace kvt {
namespace {

using rpc::FromWire;
using rpc::ToGrpc;
using rpc::ToWire;

class Stub final : public CoordinatorApi {
 public:
  Stub(absl::string_view address, absl::Duration timeout)
      : peer_("coordinator", address, timeout), stub_(peer_.channel()) {}

  absl::StatusOr<RegisterReply> Register(const RegisterRequest& request) override {
    kvtide::RegisterRequest wire;
    kvtide::RegisterReply reply;
    ToWire(request, &wire);
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::Register, wire, &reply));
    return FromWire(reply);
  }
  absl::StatusOr<HeartbeatReply> Heartbeat(const HeartbeatRequest& request) override {
    kvtide::HeartbeatRequest wire;
    kvtide::HeartbeatReply reply;
    ToWire(request, &wire);
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::Heartbeat, wire, &reply));
    return FromWire(reply);
  }
  absl::Status Leave(const NodeName& name, BootEpoch epoch) override {
    kvtide::LeaveRequest wire;
    kvtide::Empty reply;
    wire.set_name(name);
    wire.set_epoch(epoch.value());
    return peer_.Call(stub_, &Rpc::Leave, wire, &reply);
  }
  absl::StatusOr<AdmitReply> Admit(const AdmitRequest& request) override {
    kvtide::AdmitRequest wire;
    kvtide::AdmitReply reply;
    ToWire(request, &wire);
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::Admit, wire, &reply));
    return FromWire(reply);
  }
  absl::StatusOr<PlaceReply> Place(const PlaceRequest& request) override {
    kvtide::PlaceRequest wire;
    kvtide::PlaceReply reply;
    ToWire(request, &wire);
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::Place, wire, &reply));
    return FromWire(reply);
  }
  absl::StatusOr<RegrantReply> Regrant(const RegrantRequest& request) override {
    kvtide::RegrantRequest wire;
    kvtide::RegrantReply reply;
    ToWire(request, &wire);
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::Regrant, wire, &reply));
    return FromWire(reply);
  }
  absl::Status Cancel(TicketId id, const std::string& capability) override {
    kvtide::CancelRequest wire;
    kvtide::Empty reply;
    wire.set_id(id.value());
    wire.set_capability(capability);
    return peer_.Call(stub_, &Rpc::Cancel, wire, &reply);
  }
  absl::Status Update(const std::vector<TicketUpdate>& updates) override {
    kvtide::UpdateRequest wire;
    kvtide::Empty reply;
    for (const TicketUpdate& update : updates) ToWire(update, wire.add_updates());
    return peer_.Call(stub_, &Rpc::Update, wire, &reply);
  }
  absl::StatusOr<ClusterView> View() override {
    kvtide::ClusterView reply;
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::View, kvtide::Empty(), &reply));
    return FromWire(reply);
  }
  absl::StatusOr<ClusterStatus> Status() override {
    kvtide::ClusterStatus reply;
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::Status, kvtide::Empty(), &reply));
    return FromWire(reply);
  }
  absl::StatusOr<std::vector<RequestStatus>> Requests() override {
    kvtide::RequestList reply;
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::Requests, kvtide::Empty(), &reply));
    std::vector<RequestStatus> out;
    for (const auto& request : reply.requests()) {
      KVT_ASSIGN_OR_RETURN(RequestStatus status, FromWire(request));
      out.push_back(std::move(status));
    }
    return out;
  }
  absl::StatusOr<std::vector<ModelInfo>> Models() override {
    kvtide::ModelList reply;
    KVT_RETURN_IF_ERROR(peer_.Call(stub_, &Rpc::Models, kvtide::Empty(), &reply));
    std::vector<ModelInfo> out;
    for (const auto& model : reply.models()) out.push_back(FromWire(model));
    return out;
  }

 private:
  using Rpc = kvtide::CoordinatorRpc::Stub;
  const rpc::Peer peer_;
  Rpc stub_;
};

class Service final : public kvtide::CoordinatorRpc::Service {
 public:
  explicit Service(CoordinatorApi& api) : api_(api) {}

  grpc::Status Register(grpc::ServerContext* context, const kvtide::RegisterRequest* request,
                        kvtide::RegisterReply* reply) override {
    const auto decoded = FromWire(*request);
    if (!decoded.ok()) return ToGrpc(decoded.status(), context);
    return Answer(context, api_.Register(*decoded), reply);
  }
  grpc::Status Heartbeat(grpc::ServerContext* context, const kvtide::HeartbeatRequest* request,
                         kvtide::HeartbeatReply* reply) override {
    return Answer(context, api_.Heartbeat(FromWire(*request)), reply);
  }
  grpc::Status Leave(grpc::ServerContext* context, const kvtide::LeaveRequest* request,
                     kvtide::Empty*) override {
    return ToGrpc(api_.Leave(request->name(), BootEpoch(request->epoch())), context);
  }
  grpc::Status Admit(grpc::ServerContext* context, const kvtide::AdmitRequest* request,
                     kvtide::AdmitReply* reply) override {
    const auto decoded = FromWire(*request);
    if (!decoded.ok()) return ToGrpc(decoded.status(), context);
    return Answer(context, api_.Admit(*decoded), reply);
  }
  grpc::Status Place(grpc::ServerContext* context, const kvtide::PlaceRequest* request,
                     kvtide::PlaceReply* reply) override {
    return Answer(context, api_.Place(FromWire(*request)), reply);
  }
  grpc::Status Regrant(grpc::ServerContext* context, const kvtide::RegrantRequest* request,
                       kvtide::RegrantReply* reply) override {
    return Answer(context, api_.Regrant(FromWire(*request)), reply);
  }
  grpc::Status Cancel(grpc::ServerContext* context, const kvtide::CancelRequest* request,
                      kvtide::Empty*) override {
    return ToGrpc(api_.Cancel(TicketId(request->id()), request->capability()), context);
  }
  grpc::Status Update(grpc::ServerContext* context, const kvtide::UpdateRequest* request,
                      kvtide::Empty*) override {
    std::vector<TicketUpdate> updates;
    for (const auto& update : request->updates()) {
      auto decoded = FromWire(update);
      if (!decoded.ok()) return ToGrpc(decoded.status(), context);
      updates.push_back(*std::move(decoded));
    }
    return ToGrpc(api_.Update(updates), context);
  }
  grpc::Status View(grpc::ServerContext* context, const kvtide::Empty*,
                    kvtide::ClusterView* reply) override {
    return Answer(context, api_.View(), reply);
  }
  grpc::Status Status(grpc::ServerContext* context, const kvtide::Empty*,
                      kvtide::ClusterStatus* reply) override {
    return Answer(context, api_.Status(), reply);
  }
  grpc::Status Requests(grpc::ServerContext* context, const kvtide::Empty*,
                        kvtide::RequestList* reply) override {
    const auto answer = api_.Requests();
    if (!answer.ok()) return ToGrpc(answer.status(), context);
    for (const RequestStatus& request : *answer) ToWire(request, reply->add_requests());
    return ToGrpc(absl::OkStatus(), context);
  }
  grpc::Status Models(grpc::ServerContext* context, const kvtide::Empty*,
                      kvtide::ModelList* reply) override {
    const auto answer = api_.Models();
    if (!answer.ok()) return ToGrpc(answer.status(), context);
    for (const ModelInfo& model : *answer) ToWire(model, reply->add_models());
    return ToGrpc(absl::OkStatus(), context);
  }

 private:
  template <typename T, typename Wire>
  static grpc::Status Answer(grpc::ServerContext* context, const absl::StatusOr<T>& answer,
                             Wire* reply) {
    if (answer.ok()) ToWire(*answer, reply);
    return ToGrpc(answer.status(), context);
  }

  CoordinatorApi& api_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> ServeCoordinator(CoordinatorApi& api,
                                                            absl::string_view address) {
  return rpc::StartServer(std::make_unique<Service>(api), "coordinator", address);
}

std::unique_ptr<CoordinatorApi> ConnectCoordinator(absl::string_view address,
                                                   absl::Duration timeout) {
  return std::make_unique<Stub>(address, timeout);
}

}  // namespace kvt
