// PrefillApi and DecodeApi over gRPC: client stubs and servers around implementations.
#include <utility>

#include "kernels/base/check.h"
#include "kvstore/wire/rpc_support.h"
#include "kvstore/wire/worker.grpc.pb.h"
#include "kvstore/wire/worker_convert.h"

namespace kvt {
namespace {

using rpc::FromWire;
using rpc::ToGrpc;
using rpc::ToWire;

template <typename Rpc>
absl::Status CallCancel(const rpc::Peer& peer, Rpc& stub, TicketId id,
                        const std::string& capability) {
  kvtide::CancelRequest wire;
  kvtide::Empty reply;
  wire.set_id(id.value());
  wire.set_capability(capability);
  return peer.Call(stub, &Rpc::Cancel, wire, &reply);
}

// The receiver side of a stream: decodes an event and asks the sink whether to go on.
template <typename Wire, typename Sink>
auto Decoding(const Sink& sink) {
  return [&sink](const Wire& wire) -> absl::StatusOr<bool> {
    const auto event = FromWire(wire);
    if (!event.ok()) return event.status();
    return sink(*event);
  };
}

// The sender side: false once the receiver is gone.
template <typename Wire, typename Event>
auto Encoding(grpc::ServerContext* context, grpc::ServerWriter<Wire>* writer) {
  return [context, writer](const Event& event) {
    if (context->IsCancelled()) return false;
    Wire wire;
    ToWire(event, &wire);
    return writer->Write(wire);
  };
}

class PrefillStub final : public PrefillApi {
 public:
  PrefillStub(absl::string_view address, absl::Duration timeout)
      : peer_("prefill worker", address, timeout), stub_(peer_.channel()) {}

  absl::Status Submit(const SubmitRequest& request, const PrefillSink& sink) override {
    kvtide::SubmitRequest wire;
    kvtide::PrefillEvent event;
    ToWire(request, &wire);
    return peer_.Stream(
        [&](grpc::ClientContext* context) { return stub_.Submit(context, wire); }, &event,
        Decoding<kvtide::PrefillEvent>(sink));
  }
  absl::Status Resume(const ResumeRequest& request) override {
    kvtide::ResumeRequest wire;
    kvtide::Empty reply;
    ToWire(request, &wire);
    return peer_.Call(stub_, &Rpc::Resume, wire, &reply);
  }
  absl::Status Cancel(TicketId id, const std::string& capability) override {
    return CallCancel(peer_, stub_, id, capability);
  }

 private:
  using Rpc = kvtide::PrefillRpc::Stub;
  const rpc::Peer peer_;
  Rpc stub_;
};

class DecodeStub final : public DecodeApi {
 public:
  DecodeStub(absl::string_view address, absl::Duration timeout)
      : peer_("decode worker", address, timeout), stub_(peer_.channel()) {}

  absl::Status HandOver(const HandOverRequest& request) override {
    kvtide::HandOverRequest wire;
    kvtide::Empty reply;
    ToWire(request, &wire);
    return peer_.Call(stub_, &Rpc::HandOver, wire, &reply);
  }
  absl::Status Attach(const AttachRequest& request, const TokenSink& sink) override {
    kvtide::AttachRequest wire;
    kvtide::TokenEvent event;
    ToWire(request, &wire);
    return peer_.Stream(
        [&](grpc::ClientContext* context) { return stub_.Attach(context, wire); }, &event,
        Decoding<kvtide::TokenEvent>(sink));
  }
  absl::Status Cancel(TicketId id, const std::string& capability) override {
    return CallCancel(peer_, stub_, id, capability);
  }

 private:
  using Rpc = kvtide::DecodeRpc::Stub;
  const rpc::Peer peer_;
  Rpc stub_;
};

class PrefillService final : public kvtide::PrefillRpc::Service {
 public:
  explicit PrefillService(PrefillApi& api) : api_(api) {}

  grpc::Status Submit(grpc::ServerContext* context, const kvtide::SubmitRequest* request,
                      grpc::ServerWriter<kvtide::PrefillEvent>* writer) override {
    return ToGrpc(api_.Submit(FromWire(*request),
                              Encoding<kvtide::PrefillEvent, PrefillEvent>(context, writer)),
                  context);
  }
  grpc::Status Resume(grpc::ServerContext* context, const kvtide::ResumeRequest* request,
                      kvtide::Empty*) override {
    const absl::StatusOr<ResumeRequest> resume = FromWire(*request);
    return ToGrpc(resume.ok() ? api_.Resume(*resume) : resume.status(), context);
  }
  grpc::Status Cancel(grpc::ServerContext* context, const kvtide::CancelRequest* request,
                      kvtide::Empty*) override {
    return ToGrpc(api_.Cancel(TicketId(request->id()), request->capability()), context);
  }

 private:
  PrefillApi& api_;
};

class DecodeService final : public kvtide::DecodeRpc::Service {
 public:
  explicit DecodeService(DecodeApi& api) : api_(api) {}

  grpc::Status HandOver(grpc::ServerContext* context, const kvtide::HandOverRequest* request,
                        kvtide::Empty*) override {
    const absl::StatusOr<HandOverRequest> hand_over = FromWire(*request);
    return ToGrpc(hand_over.ok() ? api_.HandOver(*hand_over) : hand_over.status(), context);
  }
  grpc::Status Attach(grpc::ServerContext* context, const kvtide::AttachRequest* request,
                      grpc::ServerWriter<kvtide::TokenEvent>* writer) override {
    return ToGrpc(api_.Attach(FromWire(*request),
                              Encoding<kvtide::TokenEvent, TokenEvent>(context, writer)),
                  context);
  }
  grpc::Status Cancel(grpc::ServerContext* context, const kvtide::CancelRequest* request,
                      kvtide::Empty*) override {
    return ToGrpc(api_.Cancel(TicketId(request->id()), request->capability()), context);
  }

 private:
  DecodeApi& api_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<RpcServer>> ServePrefill(PrefillApi& api,
                                                        absl::string_view address) {
  return rpc::StartServer(std::make_unique<PrefillService>(api), "prefill worker", address);
}

absl::StatusOr<std::unique_ptr<RpcServer>> ServeDecode(DecodeApi& api, absl::string_view address) {
  return rpc::StartServer(std::make_unique<DecodeService>(api), "decode worker", address);
}

std::unique_ptr<PrefillApi> ConnectPrefill(absl::string_view address, absl::Duration timeout) {
  return std::make_unique<PrefillStub>(address, timeout);
}

std::unique_ptr<DecodeApi> ConnectDecode(absl::string_view address, absl::Duration timeout) {
  return std::make_unique<DecodeStub>(address, timeout);
}

}  // namespace kvt
