#include "tests/contract/lying_store.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kvstore/media/unix_socket.h"
#include "tests/contract/transport_fixture.h"

namespace kvt {
namespace {

template <typename T>
std::vector<std::byte> BytesOf(const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  return std::vector<std::byte>(bytes, bytes + sizeof(value));
}

}  // namespace

LyingUcxStore::LyingUcxStore(Script script) : script_(std::move(script)) {
  UcxOptions options;
  options.tls = "tcp";
  options.net_devices = "lo";
  worker_ = std::move(*UcxWorker::Create(options));
  const UcxSocketAddress any = *ParseSocketAddress("127.0.0.1:0");
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&any.storage);
  params.sockaddr.addrlen = any.size;
  params.conn_handler.arg = this;
  params.conn_handler.cb = [](ucp_conn_request_h request, void* self) {
    auto* store = static_cast<LyingUcxStore*>(self);
    if (store->ep_ != nullptr || store->lost_) {
      (void)ucp_listener_reject(store->listener_, request);
      return;
    }
    ucp_ep_params_t ep{};
    ep.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                    UCP_EP_PARAM_FIELD_ERR_HANDLER;
    ep.conn_request = request;
    ep.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    ep.err_handler.arg = store;
    ep.err_handler.cb = [](void* lost, ucp_ep_h, ucs_status_t) {
      auto* peer = static_cast<LyingUcxStore*>(lost);
      peer->lost_ = true;
      MutexLock lock(peer->mu_);
      peer->closed_ = true;
      peer->changed_.NotifyAll();
      peer->worker_->Wake();
    };
    KVT_CHECK(ucp_ep_create(store->worker_->worker(), &ep, &store->ep_) == UCS_OK);
  };
  KVT_CHECK(ucp_listener_create(worker_->worker(), &params, &listener_) == UCS_OK);
  ucp_listener_attr_t attr{};
  attr.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  KVT_CHECK(ucp_listener_query(listener_, &attr) == UCS_OK);
  address_ = absl::StrCat("ucx:", FormatSocketAddress(attr.sockaddr));
  worker_->Start(*this);
}

LyingUcxStore::~LyingUcxStore() { worker_->Stop(); }

void LyingUcxStore::Send(const UcxHeader& header, std::vector<std::byte> payload) {
  MutexLock lock(mu_);
  queue_.emplace_back(header, std::move(payload));
  worker_->Wake();
}

bool LyingUcxStore::AwaitSent(absl::Duration timeout) {
  const absl::Time end = In(timeout);
  MutexLock lock(mu_);
  while ((!queue_.empty() || unsent_ > 0) && !closed_) {
    if (RealClock::Get().Now() >= end) return false;
    changed_.WaitFor(mu_, absl::Milliseconds(100));
  }
  return true;
}

bool LyingUcxStore::Poll(absl::Time, bool) {
  if (worker_->stopping() && listener_ != nullptr) {
    ucp_listener_destroy(std::exchange(listener_, nullptr));
    if (ep_ == nullptr) drained_ = true;
  }
  if ((lost_ || worker_->stopping()) && ep_ != nullptr) {
    UcxForceClose(
        *worker_, std::exchange(ep_, nullptr),
        [](void* self) {
          static_cast<LyingUcxStore*>(self)->drained_ = true;
          static_cast<LyingUcxStore*>(self)->worker_->Wake();
        },
        this);
    return true;
  }
  while (ep_ != nullptr) {
    {
      MutexLock lock(mu_);
      if (queue_.empty()) return false;
      sent_.push_back(std::make_unique<Slot>());
      Slot& slot = *sent_.back();
      slot.store = this;
      slot.header = queue_.front().first;
      slot.header.channel = client_channel_;
      slot.payload = std::move(queue_.front().second);
      queue_.erase(queue_.begin());
      ++unsent_;
      slot.sent = [](UcxSlot* self, ucs_status_t) {
        LyingUcxStore* store = static_cast<Slot*>(self)->store;
        MutexLock inner(store->mu_);
        --store->unsent_;
        store->changed_.NotifyAll();
      };
    }
    Slot& slot = *sent_.back();
    UcxPayload payload;
    payload.data = slot.payload.data();
    payload.size = slot.payload.size();
    UcxSendMessage(ep_, slot, payload, UcxReply::kNone);
  }
  return false;
}

void LyingUcxStore::OnMessage(const UcxReceived& message) {
  if (message.header.type != UcxMessageType::kAttach) return script_(*this, message);
  AttachHello hello;
  std::memcpy(&hello, message.payload.data(), sizeof(hello));
  client_channel_ = hello.channel;
  UcxHeader header;
  header.type = UcxMessageType::kAttachReply;
  Send(header, BytesOf(MakeAttachReply(absl::OkStatus(), kTransportWireVersion, 1, kMiB)));
}

LyingShmStore::LyingShmStore()
    : path_(absl::StrCat(testing::TempDir(), "kvt-lying-", getpid(), ".sock")) {
  listener_ = std::move(*ListenUnix(path_));
  SharedMappingOptions options;
  arena_ = std::make_unique<SharedMapping>(*SharedMapping::Create("lying-arena", kMiB, options));
  table_ = std::make_unique<RecordTable>(*RecordTable::Create(64));
  options.receiver_writes = true;
  ring_ = std::make_unique<SharedMapping>(
      *SharedMapping::Create("lying-ring", kRingMappingBytes, options));
  doorbell_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  answered_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  thread_ = std::thread([this] { Serve(); });
}

LyingShmStore::~LyingShmStore() {
  thread_.join();
  (void)unlink(path_.c_str());
}

std::string LyingShmStore::Address() const { return absl::StrCat("shm:", path_); }

void LyingShmStore::Serve() {
  const absl::Time end = In(kPatience);
  absl::StatusOr<UniqueFd> socket = absl::UnavailableError("nobody came");
  while (!socket.ok() && RealClock::Get().Now() < end) {
    socket = AcceptUnix(listener_.get());
    if (!socket.ok()) std::this_thread::yield();
  }
  KVT_CHECK(socket.ok(), socket.status().ToString());
  socket_ = *std::move(socket);
  KVT_CHECK(ReceiveFdMessage(socket_.get(), end).ok());
  const AttachReply reply =
      MakeAttachReply(absl::OkStatus(), kTransportWireVersion, 0, arena_->size());
  const int fds[] = {arena_->fd(), table_->mapping().fd(), ring_->fd(), doorbell_.get(),
                     answered_.get()};
  KVT_CHECK(SendFdMessage(socket_.get(), BytesOf(reply), fds, end).ok());
}

std::vector<RingMessage> LyingShmStore::AwaitMessages(size_t messages, absl::Duration timeout) {
  const absl::Time end = In(timeout);
  std::vector<RingMessage> seen;
  uint64_t at = 0;
  while (seen.size() < messages) {
    if (control().head.load(std::memory_order_acquire) > at) {
      RingMessage message;
      std::memcpy(&message, ring_->mutable_data() + kRingDataOffset + at, sizeof(message));
      at += message.total;
      seen.push_back(message);
    } else if (RealClock::Get().Now() >= end) {
      return {};
    } else {
      std::this_thread::yield();
    }
  }
  return seen;
}

void LyingShmStore::Answer(const RingAnswer& answer) {
  auto* answers = reinterpret_cast<RingAnswer*>(ring_->mutable_data() + 4096);
  answers[answers_ % kRingAnswers] = answer;
  control().answers_head.store(++answers_, std::memory_order_seq_cst);
  const uint64_t one = 1;
  KVT_CHECK(write(answered_.get(), &one, sizeof(one)) == sizeof(one));
}

}  // namespace kvt
