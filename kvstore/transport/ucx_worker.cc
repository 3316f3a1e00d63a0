#include "kvstore/transport/ucx_worker.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <ucs/debug/log_def.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/units.h"
#include "kvstore/transport/ucx_devices.h"
#include "kvstore/transport/ucx_send_guard.h"

namespace kvt {
namespace {

// Longest sleep, so that a lost wake-up of the vendor library costs a delay and not a hang.
constexpr absl::Duration kSleepMax = absl::Seconds(5);

// UCX prints to the standard output by itself; what it says belongs in our log. Failures come back
// as statuses too, so that its errors are no more than warnings here.
ucs_log_func_rc_t LogOfUcx(const char*, unsigned, const char*, ucs_log_level_t level,
                           const ucs_log_component_config_t*, const char* format,
                           va_list arguments) {
  if (level > UCS_LOG_LEVEL_WARN) return UCS_LOG_FUNC_RC_CONTINUE;
  char text[512];
  (void)std::vsnprintf(text, sizeof(text), format, arguments);
  if (level == UCS_LOG_LEVEL_WARN) {
    KVT_LOG(kInfo, "ucx: ", text);
  } else {
    KVT_LOG(kWarning, "ucx: ", text);
  }
  return UCS_LOG_FUNC_RC_STOP;
}

// UCX would only warn of a device that it does not know, and listen nowhere or elsewhere.
absl::Status CheckDevices(const UcxOptions& options) {
  const char* const environment = std::getenv("UCX_NET_DEVICES");
  std::string names = options.net_devices;
  if (names.empty() && environment != nullptr) names = environment;
  if (names.empty()) return absl::OkStatus();
  KVT_ASSIGN_OR_RETURN(const std::vector<UcxDevice> devices, ListUcxDevices());
  return CheckNetDevices(devices, names);
}

absl::Status Modify(ucp_config_t* config, const char* key, const std::string& value) {
  const ucs_status_t status = ucp_config_modify(config, key, value.c_str());
  if (status == UCS_OK) return absl::OkStatus();
  return UcxError(absl::StrCat("ucx: setting ", key, "=", value), status);
}

}  // namespace

absl::Status UcxError(absl::string_view what, ucs_status_t status) {
  const std::string message = absl::StrCat(what, ": ", ucs_status_string(status));
  switch (status) {
    case UCS_ERR_NO_MEMORY:
      return absl::ResourceExhaustedError(
          absl::StrCat(message, "; raise the locked-memory limit (ulimit -l, LimitMEMLOCK=)"));
    case UCS_ERR_NO_DEVICE:
      return absl::InvalidArgumentError(
          absl::StrCat(message, "; `ucx_info -d` lists transports and devices"));
    case UCS_ERR_INVALID_PARAM:
      return absl::InvalidArgumentError(message);
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_ENDPOINT_TIMEOUT:
      return absl::DeadlineExceededError(message);
    default:
      return absl::UnavailableError(message);
  }
}

absl::Status UcxRegistrationError(uint64_t bytes, ucs_status_t status) {
  const std::string what = absl::StrCat("ucx: registering ", FormatBytes(bytes), " of memory");
  const absl::Status error = UcxError(what, status);
  if (status == UCS_ERR_NO_MEMORY) return error;  // names the limit
  return absl::Status(error.code(),
                      absl::StrCat(error.message(),
                                   "; `kvtide doctor` shows what each device can register; try a "
                                   "smaller arena_bytes, or ucx_tls = \"tcp\", which registers "
                                   "nothing"));
}

TransportSettings UcxSettings() {
  return TransportSettings{kUcxReceiveSegmentBytes, static_cast<uint32_t>(kUcxIoVectorMax)};
}

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Create(const UcxOptions& options) {
  KVT_RETURN_IF_ERROR(options.Validate());
  std::unique_ptr<UcxWorker> worker(new UcxWorker(options));
  KVT_RETURN_IF_ERROR(worker->Init());
  return worker;
}

absl::Status UcxWorker::Init() {
  static const bool logs_redirected = [] {
    ucs_log_push_handler(&LogOfUcx);
    return true;
  }();
  KVT_CHECK(logs_redirected);
  KVT_RETURN_IF_ERROR(CheckDevices(options_));
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return UcxError("ucx: reading the configuration", status);
  // Names of transport settings go without their prefix here (openucx/ucx issue 8649).
  absl::Status modified = absl::OkStatus();
  modified.Update(Modify(config, "RX_SEG_SIZE", absl::StrCat(kUcxReceiveSegmentBytes / kKiB, "k")));
  modified.Update(Modify(config, "MAX_IOV", absl::StrCat(kUcxIoVectorMax)));
  // Without the guard a peer that goes in the middle of a zero-copy send aborts the process; packing
  // instead costs the sender a copy.
  if (!UcxSendGuardActive()) modified.Update(Modify(config, "ZCOPY_THRESH", "inf"));
  if (!options_.tls.empty()) modified.Update(Modify(config, "TLS", options_.tls));
  if (!options_.net_devices.empty()) {
    modified.Update(Modify(config, "NET_DEVICES", options_.net_devices));
  }
  if (!modified.ok()) {
    ucp_config_release(config);
    return modified;
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  status = ucp_init(&params, config, &context_);
  ucp_config_release(config);
  if (status != UCS_OK) {
    return UcxError(absl::StrCat("ucx: start with tls '", options_.tls, "' on devices '",
                                 options_.net_devices, "'"),
                    status);
  }
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  worker_params.events = UCP_WAKEUP_TX | UCP_WAKEUP_RX;
  status = ucp_worker_create(context_, &worker_params, &worker_);
  if (status != UCS_OK) return UcxError("ucx: creating the worker", status);

  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                       UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
  handler.id = kUcxMessageId;
  handler.cb = &UcxWorker::OnActiveMessage;
  handler.arg = this;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  status = ucp_worker_set_am_recv_handler(worker_, &handler);
  if (status != UCS_OK) return UcxError("ucx: registering the message handler", status);

  int worker_fd = -1;
  status = ucp_worker_get_efd(worker_, &worker_fd);
  if (status != UCS_OK) return UcxError("ucx: no wake-up descriptor", status);
  epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("ucx: no descriptor for the event loop: ", std::strerror(errno)));
  }
  for (const int fd : {worker_fd, wake_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    KVT_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0, std::strerror(errno));
  }
  return absl::OkStatus();
}

UcxWorker::~UcxWorker() { Stop(); }

void UcxWorker::Start(UcxClient& client) {
  client_ = &client;
  thread_ = std::thread([this] { Run(); });
  if (options_.cpu >= 0) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(options_.cpu, &cpus);
    (void)pthread_setaffinity_np(thread_.native_handle(), sizeof(cpus), &cpus);
  }
}

void UcxWorker::Wake() {
  work_.store(true, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst)) {
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof(one));
  }
}

void UcxWorker::Stop(ucp_mem_h unmap) {
  stopping_.store(true, std::memory_order_release);
  if (thread_.joinable()) {
    Wake();
    thread_.join();
  }
  // Takes down what is left of closed endpoints, so that peers notice.
  if (worker_ != nullptr) ucp_worker_destroy(std::exchange(worker_, nullptr));
  if (context_ == nullptr) return;
  if (unmap != nullptr) (void)ucp_mem_unmap(context_, unmap);
  ucp_cleanup(std::exchange(context_, nullptr));
}

void UcxWorker::Run() {
  absl::Time last_event = RealClock::Get().Now();
  while (true) {
    const unsigned events = ucp_worker_progress(worker_);
    const bool woken = work_.exchange(false, std::memory_order_seq_cst);
    const absl::Time now = RealClock::Get().Now();
    const bool did = client_->Poll(now, woken);
    if (stopping() && client_->Drained()) return;
    if (events != 0 || woken || did || now < awake_until_) {
      if (events != 0 || woken || did) last_event = now;
      continue;
    }
    if (now - last_event < options_.poll_before_sleep) continue;
    Sleep(std::min(client_->NextTimer(), now + kSleepMax));
  }
}

void UcxWorker::Sleep(absl::Time until) {
  sleeping_.store(true, std::memory_order_seq_cst);
  // Either we see the work here, or whoever made it sees that we sleep and writes the descriptor.
  if (!work_.load(std::memory_order_seq_cst) && ucp_worker_arm(worker_) == UCS_OK) {
    const absl::Duration left = until - RealClock::Get().Now();
    const int64_t timeout_ms =
        left <= absl::ZeroDuration()
            ? 0
            : std::min<int64_t>(absl::ToInt64Milliseconds(std::min(left, absl::Seconds(60))) + 1,
                                60'000);
    epoll_event events[2];
    const int ready = epoll_wait(epoll_.get(), events, 2, static_cast<int>(timeout_ms));
    for (int i = 0; i < ready; ++i) {
      uint64_t count = 0;
      if (events[i].data.fd == wake_.get()) (void)!read(wake_.get(), &count, sizeof(count));
    }
  }
  sleeping_.store(false, std::memory_order_seq_cst);
}

ucs_status_t UcxWorker::OnActiveMessage(void* self, const void* header, size_t header_size,
                                        void* data, size_t size, const ucp_am_recv_param_t* param) {
  auto* worker = static_cast<UcxWorker*>(self);
  UcxReceived received;
  received.reply_ep =
      (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0 ? param->reply_ep : nullptr;
  const bool rendezvous = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (rendezvous || header_size != sizeof(UcxHeader)) {
    worker->client_->OnMalformed(received.reply_ep);
    return UCS_OK;
  }
  std::memcpy(&received.header, header, sizeof(UcxHeader));
  if (received.header.magic != kUcxMagic || received.header.reserved != 0) {
    worker->client_->OnMalformed(received.reply_ep);
    return UCS_OK;
  }
  received.payload = absl::MakeConstSpan(static_cast<const std::byte*>(data), size);
  worker->client_->OnMessage(received);
  return UCS_OK;
}

void UcxSendMessage(ucp_ep_h ep, UcxSlot& slot, const UcxPayload& payload, UcxReply reply) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK |
                       UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  if (reply == UcxReply::kWanted) param.flags |= UCP_AM_SEND_FLAG_REPLY;
  param.user_data = &slot;
  param.cb.send = [](void* request, ucs_status_t status, void* user_data) {
    ucp_request_free(request);
    auto* self = static_cast<UcxSlot*>(user_data);
    self->sent(self, status);
  };
  const void* buffer = payload.data;
  size_t count = payload.size;
  param.datatype = ucp_dt_make_contig(1);
  if (payload.io_count == 1) {
    buffer = payload.io_vector[0].buffer;
    count = payload.io_vector[0].length;
  } else if (payload.io_count > 1) {
    buffer = payload.io_vector;
    count = payload.io_count;
    param.datatype = UCP_DATATYPE_IOV;
  }
  void* request =
      ucp_am_send_nbx(ep, kUcxMessageId, &slot.header, sizeof(UcxHeader), buffer, count, &param);
  if (UCS_PTR_IS_PTR(request)) return;
  slot.sent(&slot, UCS_PTR_STATUS(request));
}

void UcxForceClose(UcxWorker& worker, ucp_ep_h ep, void (*closed)(void* context), void* context) {
  worker.StayAwake();
  struct Waiter {
    void (*closed)(void*);
    void* context;
  };
  auto* waiter = new Waiter{closed, context};
  ucp_request_param_t param{};
  param.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  param.user_data = waiter;
  param.cb.send = [](void* request, ucs_status_t, void* user_data) {
    ucp_request_free(request);
    std::unique_ptr<Waiter> owned(static_cast<Waiter*>(user_data));
    owned->closed(owned->context);
  };
  void* request = ucp_ep_close_nbx(ep, &param);
  if (UCS_PTR_IS_PTR(request)) return;
  std::unique_ptr<Waiter> owned(waiter);
  owned->closed(owned->context);
}

absl::StatusOr<UcxSocketAddress> ParseSocketAddress(absl::string_view text) {
  const absl::Status bad = absl::InvalidArgumentError(
      absl::StrCat("ucx: address '", text, "' is not numeric-host:port or [v6]:port"));
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port) ||
      port > 65535) {
    return bad;
  }
  std::string host(text.substr(0, colon));
  UcxSocketAddress address;
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    address.size = sizeof(*v6);
    if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) != 1) return bad;
    return address;
  }
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  v4->sin_family = AF_INET;
  v4->sin_port = htons(static_cast<uint16_t>(port));
  address.size = sizeof(*v4);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) != 1) return bad;
  return address;
}

std::string FormatSocketAddress(const sockaddr_storage& storage) {
  char host[INET6_ADDRSTRLEN] = {};
  if (storage.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    (void)inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof(host));
    return absl::StrCat("[", host, "]:", ntohs(v6->sin6_port));
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
  (void)inet_ntop(AF_INET, &v4->sin_addr, host, sizeof(host));
  return absl::StrCat(host, ":", ntohs(v4->sin_port));
}

}  // namespace kvt
