#include "kvstore/transport/ucx_link_probe.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/transport/ucx_worker.h"

namespace kvt {
namespace {

constexpr unsigned kBulkMessageId = 8;
constexpr uint64_t kOutstandingBytesMax = 1 * kGiB;

// The request travels in a header of type kPull: first = protocol, count = messages, skip =
// outstanding, bytes = message bytes.
absl::Status CheckRequest(const UcxHeader& header) {
  if (header.type != UcxMessageType::kPull || header.count == 0 || header.skip == 0 ||
      header.bytes == 0 || uint64_t{header.bytes} * header.skip > kOutstandingBytesMax ||
      header.first > 1) {
    return absl::InvalidArgumentError("link probe: malformed request");
  }
  return absl::OkStatus();
}

class ProbeServer final : public UcxLinkProbeServer, public UcxClient {
 public:
  explicit ProbeServer(std::unique_ptr<UcxWorker> worker) : worker_(std::move(worker)) {}
  ~ProbeServer() override { worker_->Stop(); }

  absl::Status Listen(const UcxServerOptions& options) {
    KVT_ASSIGN_OR_RETURN(const UcxSocketAddress address,
                         ParseSocketAddress(absl::StrCat(options.host, ":", options.port)));
    ucp_listener_params_t params{};
    params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address.storage);
    params.sockaddr.addrlen = address.size;
    params.conn_handler.arg = this;
    params.conn_handler.cb = [](ucp_conn_request_h request, void* self) {
      static_cast<ProbeServer*>(self)->OnConnect(request);
    };
    ucs_status_t status = ucp_listener_create(worker_->worker(), &params, &listener_);
    if (status != UCS_OK) return UcxError("link probe: listening", status);
    ucp_listener_attr_t attr{};
    attr.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
    status = ucp_listener_query(listener_, &attr);
    if (status != UCS_OK) return UcxError("link probe: listening", status);
    address_ = absl::StrCat("ucx:", FormatSocketAddress(attr.sockaddr));
    worker_->Start(*this);
    return absl::OkStatus();
  }

  std::string Address() const override { return address_; }

  void OnMessage(const UcxReceived& message) override {
    if (!CheckRequest(message.header).ok() || message.reply_ep != ep_) return;
    request_ = message.header;
    left_ = request_.count;
    buffer_.resize(request_.bytes);
  }
  void OnMalformed(ucp_ep_h) override {}
  bool Poll(absl::Time, bool) override {
    if (lost_ && ep_ != nullptr) {
      UcxForceClose(
          *worker_, std::exchange(ep_, nullptr), [](void*) {}, nullptr);
      left_ = 0;
    }
    if (worker_->stopping() && listener_ != nullptr) {
      ucp_listener_destroy(std::exchange(listener_, nullptr));
    }
    bool did = false;
    while (left_ > 0 && outstanding_ < request_.skip && ep_ != nullptr) {
      --left_;
      ++outstanding_;
      did = true;
      Send();
    }
    return did;
  }
  absl::Time NextTimer() const override { return absl::InfiniteFuture(); }
  bool Drained() const override { return listener_ == nullptr; }

 private:
  void OnConnect(ucp_conn_request_h request) {
    if (ep_ != nullptr) {
      (void)ucp_listener_reject(listener_, request);
      return;
    }
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                        UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.conn_request = request;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.arg = this;
    params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t) {
      static_cast<ProbeServer*>(self)->lost_ = true;
    };
    lost_ = false;
    if (ucp_ep_create(worker_->worker(), &params, &ep_) != UCS_OK) ep_ = nullptr;
  }
  void Send() {
    ucp_request_param_t param{};
    param.op_attr_mask =
        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.flags = request_.first == 0 ? UCP_AM_SEND_FLAG_EAGER : UCP_AM_SEND_FLAG_RNDV;
    param.user_data = this;
    param.cb.send = [](void* request, ucs_status_t, void* self) {
      ucp_request_free(request);
      --static_cast<ProbeServer*>(self)->outstanding_;
    };
    void* request =
        ucp_am_send_nbx(ep_, kBulkMessageId, nullptr, 0, buffer_.data(), buffer_.size(), &param);
    if (!UCS_PTR_IS_PTR(request)) --outstanding_;
  }

  std::unique_ptr<UcxWorker> worker_;
  std::string address_;
  ucp_listener_h listener_ = nullptr;
  ucp_ep_h ep_ = nullptr;
  bool lost_ = false;
  UcxHeader request_;
  uint32_t left_ = 0;
  uint32_t outstanding_ = 0;
  std::vector<std::byte> buffer_;
};

class Probe final : public UcxLinkProbe, public UcxClient {
 public:
  explicit Probe(std::unique_ptr<UcxWorker> worker) : worker_(std::move(worker)) {}
  ~Probe() override {
    closing_.store(true, std::memory_order_release);
    worker_->Stop();
  }

  absl::Status Connect(const std::string& address) {
    KVT_ASSIGN_OR_RETURN(const UcxSocketAddress parsed,
                         ParseSocketAddress(absl::StripPrefix(address, "ucx:")));
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                         UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kBulkMessageId;
    handler.cb = &Probe::OnBulk;
    handler.arg = this;
    ucs_status_t status = ucp_worker_set_am_recv_handler(worker_->worker(), &handler);
    if (status != UCS_OK) return UcxError("link probe", status);
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&parsed.storage);
    params.sockaddr.addrlen = parsed.size;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.arg = this;
    params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t status) {
      static_cast<Probe*>(self)->Finish(UcxError("link probe: the peer is gone", status));
    };
    status = ucp_ep_create(worker_->worker(), &params, &ep_);
    if (status != UCS_OK) return UcxError("link probe: connecting", status);
    worker_->Start(*this);
    return absl::OkStatus();
  }

  absl::StatusOr<absl::Duration> Measure(const LinkProbeOptions& options,
                                         absl::Time deadline) override {
    UcxHeader header;
    header.type = UcxMessageType::kPull;
    header.first = options.protocol == LinkProbeProtocol::kEager ? 0 : 1;
    header.count = options.messages;
    header.skip = options.outstanding;
    header.bytes = options.message_bytes;
    KVT_RETURN_IF_ERROR(CheckRequest(header));
    const absl::Time start = RealClock::Get().Now();
    MutexLock lock(mu_);
    if (!result_.ok()) return result_;
    request_ = header;
    pending_ = true;
    done_ = false;
    worker_->Wake();
    while (!done_) {
      const absl::Duration left = deadline - RealClock::Get().Now();
      if (left <= absl::ZeroDuration()) return absl::DeadlineExceededError("link probe: too slow");
      changed_.WaitFor(mu_, left);
    }
    if (!result_.ok()) return result_;
    return end_ - start;
  }

  bool Poll(absl::Time, bool woken) override {
    if (closing_.load(std::memory_order_acquire) && ep_ != nullptr) {
      UcxForceClose(
          *worker_, std::exchange(ep_, nullptr),
          [](void* self) { static_cast<Probe*>(self)->closed_ = true; }, this);
      return true;
    }
    if (!woken || ep_ == nullptr) return false;
    {
      MutexLock lock(mu_);
      if (!pending_) return false;
      pending_ = false;
      slot_.header = request_;
      left_ = request_.count;
      sink_.resize(request_.bytes);
    }
    slot_.sent = [](UcxSlot*, ucs_status_t) {};
    UcxSendMessage(ep_, slot_, UcxPayload{}, UcxReply::kWanted);
    return true;
  }
  absl::Time NextTimer() const override { return absl::InfiniteFuture(); }
  void OnMessage(const UcxReceived&) override {}
  void OnMalformed(ucp_ep_h) override {}
  bool Drained() const override { return closed_; }

 private:
  static ucs_status_t OnBulk(void* arg, const void*, size_t, void* data, size_t size,
                             const ucp_am_recv_param_t* param) {
    auto* self = static_cast<Probe*>(arg);
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
      self->Arrived();
      return UCS_OK;
    }
    ucp_request_param_t receive{};
    receive.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    receive.user_data = self;
    receive.cb.recv_am = [](void* request, ucs_status_t status, size_t, void* user_data) {
      ucp_request_free(request);
      auto* probe = static_cast<Probe*>(user_data);
      if (status != UCS_OK) return probe->Finish(UcxError("link probe: receive", status));
      probe->Arrived();
    };
    void* request =
        ucp_am_recv_data_nbx(self->worker_->worker(), data, self->sink_.data(), size, &receive);
    if (request == nullptr) self->Arrived();
    return UCS_INPROGRESS;
  }
  void Arrived() {
    if (left_ > 0 && --left_ == 0) Finish(absl::OkStatus());
  }
  void Finish(const absl::Status& status) {
    MutexLock lock(mu_);
    result_.Update(status);
    end_ = RealClock::Get().Now();
    done_ = true;
    changed_.NotifyAll();
  }

  std::unique_ptr<UcxWorker> worker_;
  ucp_ep_h ep_ = nullptr;
  bool closed_ = false;
  std::atomic<bool> closing_{false};
  UcxSlot slot_;
  uint32_t left_ = 0;
  std::vector<std::byte> sink_;

  Mutex mu_;
  CondVar changed_;
  UcxHeader request_ ABSL_GUARDED_BY(mu_);
  bool pending_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time end_ ABSL_GUARDED_BY(mu_);
  absl::Status result_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<UcxLinkProbeServer>> StartUcxLinkProbe(
    const UcxServerOptions& options) {
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<UcxWorker> worker, UcxWorker::Create(options.ucx));
  auto server = std::make_unique<ProbeServer>(std::move(worker));
  KVT_RETURN_IF_ERROR(server->Listen(options));
  return server;
}

absl::StatusOr<std::unique_ptr<UcxLinkProbe>> ConnectUcxLinkProbe(const UcxOptions& options,
                                                                  const std::string& address) {
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<UcxWorker> worker, UcxWorker::Create(options));
  auto probe = std::make_unique<Probe>(std::move(worker));
  KVT_RETURN_IF_ERROR(probe->Connect(address));
  return probe;
}

}  // namespace kvt
