#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/wire/rpc_support.h"
#include "kvstore/wire/store.grpc.pb.h"
#include "kvstore/wire/store_convert.h"
#include "kvstore/wire/wire_convert.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

class StoreService final : public kvtide::Store::Service {
 public:
  explicit StoreService(StoreApi& api) : api_(api) {}

  grpc::Status OpenSession(grpc::ServerContext* context, const kvtide::OpenSessionRequest* request,
                           kvtide::OpenSessionReply* reply) override {
    return Answer(context, api_.OpenSession(rpc::FromWire(*request)), reply);
  }
  grpc::Status Renew(grpc::ServerContext* context, const kvtide::RenewRequest* request,
                     kvtide::RenewReply* reply) override {
    const absl::StatusOr<RenewRequest> decoded = rpc::FromWire(*request);
    if (!decoded.ok()) return rpc::ToGrpc(decoded.status(), context);
    const absl::StatusOr<RenewReply> answer = api_.Renew(*decoded);
    if (answer.ok()) reply->set_lease_ns(rpc::ToNs(answer->lease));
    return rpc::ToGrpc(answer.status(), context);
  }
  grpc::Status Lookup(grpc::ServerContext* context, const kvtide::LookupRequest* request,
                      kvtide::LookupReply* reply) override {
    const absl::StatusOr<LookupRequest> decoded = rpc::FromWire(*request);
    if (!decoded.ok()) return rpc::ToGrpc(decoded.status(), context);
    return Answer(context, api_.Lookup(*decoded), reply);
  }
  grpc::Status Reserve(grpc::ServerContext* context, const kvtide::ReserveRequest* request,
                       kvtide::ReserveReply* reply) override {
    const absl::StatusOr<ReserveRequest> decoded = rpc::FromWire(*request);
    if (!decoded.ok()) return rpc::ToGrpc(decoded.status(), context);
    return Answer(context, api_.Reserve(*decoded), reply);
  }
  grpc::Status Seal(grpc::ServerContext* context, const kvtide::SealRequest* request,
                    kvtide::SealReply* reply) override {
    const absl::StatusOr<SealRequest> decoded = rpc::FromWire(*request);
    if (!decoded.ok()) return rpc::ToGrpc(decoded.status(), context);
    return Answer(context, api_.Seal(*decoded), reply);
  }
  grpc::Status Verify(grpc::ServerContext* context, const kvtide::VerifyRequest* request,
                      kvtide::Empty*) override {
    const absl::StatusOr<VerifyRequest> decoded = rpc::FromWire(*request);
    if (!decoded.ok()) return rpc::ToGrpc(decoded.status(), context);
    return rpc::ToGrpc(api_.Verify(*decoded), context);
  }
  grpc::Status Promote(grpc::ServerContext* context, const kvtide::PromoteRequest* request,
                       kvtide::PromoteReply* reply) override {
    const absl::StatusOr<PromoteRequest> decoded = rpc::FromWire(*request);
    if (!decoded.ok()) return rpc::ToGrpc(decoded.status(), context);
    return Answer(context, api_.Promote(*decoded), reply);
  }
  grpc::Status PurgeTenant(grpc::ServerContext* context,
                           const kvtide::PurgeTenantRequest* request,
                           kvtide::PurgeTenantReply* reply) override {
    return Answer(context, api_.PurgeTenant(rpc::FromWire(*request)), reply);
  }
  grpc::Status Release(grpc::ServerContext* context, const kvtide::ReleaseRequest* request,
                       kvtide::Empty*) override {
    return rpc::ToGrpc(api_.Release(rpc::FromWire(*request)), context);
  }
  grpc::Status CloseSession(grpc::ServerContext* context,
                            const kvtide::CloseSessionRequest* request, kvtide::Empty*) override {
    return rpc::ToGrpc(api_.CloseSession(SessionId(request->session())), context);
  }
  grpc::Status Stats(grpc::ServerContext* context, const kvtide::Empty*,
                     kvtide::StoreStats* reply) override {
    return Answer(context, api_.Stats(), reply);
  }

 private:
  template <typename Answered, typename Reply>
  static grpc::Status Answer(grpc::ServerContext* context, const absl::StatusOr<Answered>& answer,
                             Reply* reply) {
    if (answer.ok()) rpc::ToWire(*answer, reply);
    return rpc::ToGrpc(answer.status(), context);
  }

  StoreApi& api_;
};

class StoreStub final : public StoreApi {
 public:
  StoreStub(absl::string_view address, absl::Duration timeout)
      : peer_("store", address, timeout), stub_(kvtide::Store::NewStub(peer_.channel())) {}

  absl::StatusOr<OpenSessionReply> OpenSession(const OpenSessionRequest& request) override {
    kvtide::OpenSessionRequest wire;
    rpc::ToWire(request, &wire);
    return Ask<kvtide::OpenSessionReply>(&kvtide::Store::Stub::OpenSession, wire);
  }
  absl::StatusOr<RenewReply> Renew(const RenewRequest& request) override {
    kvtide::RenewRequest wire;
    rpc::ToWire(request, &wire);
    kvtide::RenewReply reply;
    KVT_RETURN_IF_ERROR(peer_.Call(*stub_, &kvtide::Store::Stub::Renew, wire, &reply));
    return RenewReply{.lease = rpc::FromNs(reply.lease_ns())};
  }
  absl::StatusOr<LookupReply> Lookup(const LookupRequest& request) override {
    kvtide::LookupRequest wire;
    rpc::ToWire(request, &wire);
    absl::StatusOr<LookupReply> reply =
        Ask<kvtide::LookupReply>(&kvtide::Store::Stub::Lookup, wire);
    if (reply.ok()) KVT_RETURN_IF_ERROR(CheckAnswers(reply->blocks.size(), request.blocks.size()));
    return reply;
  }
  absl::StatusOr<ReserveReply> Reserve(const ReserveRequest& request) override {
    kvtide::ReserveRequest wire;
    rpc::ToWire(request, &wire);
    absl::StatusOr<ReserveReply> reply =
        Ask<kvtide::ReserveReply>(&kvtide::Store::Stub::Reserve, wire);
    if (reply.ok()) {
      // A reservation that is pending grants nothing yet.
      const size_t asked = reply->pending ? 0 : request.blocks.size();
      KVT_RETURN_IF_ERROR(CheckAnswers(reply->blocks.size(), asked));
    }
    return reply;
  }
  absl::StatusOr<SealReply> Seal(const SealRequest& request) override {
    kvtide::SealRequest wire;
    rpc::ToWire(request, &wire);
    absl::StatusOr<SealReply> reply = Ask<kvtide::SealReply>(&kvtide::Store::Stub::Seal, wire);
    if (reply.ok()) KVT_RETURN_IF_ERROR(CheckAnswers(reply->blocks.size(), request.handles.size()));
    return reply;
  }
  absl::Status Verify(const VerifyRequest& request) override {
    kvtide::VerifyRequest wire;
    rpc::ToWire(request, &wire);
    kvtide::Empty reply;
    return peer_.Call(*stub_, &kvtide::Store::Stub::Verify, wire, &reply);
  }
  absl::StatusOr<PromoteReply> Promote(const PromoteRequest& request) override {
    kvtide::PromoteRequest wire;
    rpc::ToWire(request, &wire);
    absl::StatusOr<PromoteReply> reply =
        Ask<kvtide::PromoteReply>(&kvtide::Store::Stub::Promote, wire);
    if (reply.ok()) {
      KVT_RETURN_IF_ERROR(CheckAnswers(reply->outcomes.size(), request.records.size()));
    }
    return reply;
  }
  absl::StatusOr<PurgeTenantReply> PurgeTenant(const PurgeTenantRequest& request) override {
    kvtide::PurgeTenantRequest wire;
    rpc::ToWire(request, &wire);
    return Ask<kvtide::PurgeTenantReply>(&kvtide::Store::Stub::PurgeTenant, wire);
  }
  absl::Status Release(const ReleaseRequest& request) override {
    kvtide::ReleaseRequest wire;
    rpc::ToWire(request, &wire);
    kvtide::Empty reply;
    return peer_.Call(*stub_, &kvtide::Store::Stub::Release, wire, &reply);
  }
  absl::Status CloseSession(SessionId session) override {
    kvtide::CloseSessionRequest wire;
    wire.set_session(session.value());
    kvtide::Empty reply;
    return peer_.Call(*stub_, &kvtide::Store::Stub::CloseSession, wire, &reply);
  }
  absl::StatusOr<StoreStats> Stats() override {
    return Ask<kvtide::StoreStats>(&kvtide::Store::Stub::Stats, kvtide::Empty());
  }

 private:
  template <typename Reply, typename Request>
  auto Ask(grpc::Status (kvtide::Store::Stub::*method)(grpc::ClientContext*, const Request&,
                                                       Reply*),
           const Request& wire) -> decltype(rpc::FromWire(std::declval<const Reply&>())) {
    Reply reply;
    KVT_RETURN_IF_ERROR(peer_.Call(*stub_, method, wire, &reply));
    return rpc::FromWire(reply);
  }

  static absl::Status CheckAnswers(size_t answered, size_t asked) {
    if (answered == asked) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("store answered for ", answered, " of ", asked));
  }

  const rpc::Peer peer_;
  const std::unique_ptr<kvtide::Store::Stub> stub_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> ServeStore(StoreApi& api, absl::string_view address) {
  return rpc::StartServer(std::make_unique<StoreService>(api), "store", address);
}

std::unique_ptr<StoreApi> ConnectStore(absl::string_view address, absl::Duration timeout) {
  return std::make_unique<StoreStub>(address, timeout);
}

}  // namespace kvt
