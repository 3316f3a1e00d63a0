// The store's end of the data plane on one host: lets clients in, and applies their push rings.
// Pulls need no message (shm_transport.h).
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kvstore/media/unix_socket.h"
#include "kvstore/transport/attach_message.h"
#include "kvstore/transport/push_ring.h"
#include "kvstore/transport/shm_transport.h"

namespace kvt {
namespace {

constexpr int kEventsMax = 64;
constexpr uint32_t kBusyRounds = 32;

struct Connection {
  UniqueFd socket;
  UniqueFd doorbell;  // the client rings it for the store
  UniqueFd answered;  // the store rings it for the client
  absl::Time since;
  bool attached = false;
  bool dead = false;
  SessionId session;
  std::unique_ptr<PushRingReader> ring;
  std::unique_ptr<PushApplier> applier;
};

class ShmServer final : public TransportServer {
 public:
  ShmServer(const ShmServerOptions& options, const SharedMapping& arena, const RecordTable& table,
            PieceResolver& resolver)
      : path_(options.socket_path),
        versions_(options.versions),
        arena_(arena),
        table_(table),
        resolver_(resolver) {}
  ~ShmServer() override { Stop(); }

  absl::Status Start(int cpu) {
    KVT_ASSIGN_OR_RETURN(listener_, ListenUnix(path_));
    epoll_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
    wake_ = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_.valid() || !wake_.valid()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("shm: no descriptor for the event loop: ", std::strerror(errno)));
    }
    Watch(listener_.get());
    Watch(wake_.get());
    thread_ = std::thread([this] { Run(); });
    if (cpu >= 0) {
      cpu_set_t cpus;
      CPU_ZERO(&cpus);
      CPU_SET(cpu, &cpus);
      (void)pthread_setaffinity_np(thread_.native_handle(), sizeof(cpus), &cpus);
    }
    return absl::OkStatus();
  }

  std::string Address() const override { return absl::StrCat("shm:", path_); }
  void Stop() override {
    stopping_.store(true, std::memory_order_release);
    if (!thread_.joinable()) return;
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof(one));
    thread_.join();
    (void)unlink(path_.c_str());
  }
  TransportServerStats Stats() const override {
    TransportServerStats stats;
    stats.connections = connections_now_.load(std::memory_order_relaxed);
    stats.attaches_refused = attaches_refused_.load(std::memory_order_relaxed);
    stats.messages_refused = messages_refused_.load(std::memory_order_relaxed);
    stats.bytes_received = bytes_received_.load(std::memory_order_relaxed);
    stats.forced_closes = forced_closes_.load(std::memory_order_relaxed);
    return stats;
  }

 private:
  void Watch(int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    KVT_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0, std::strerror(errno));
  }

  void Run() {
    while (!stopping_.load(std::memory_order_acquire)) {
      bool did = false;
      for (Connection* c : Living()) did |= Serve(*c);
      Reap();
      // While rings are busy the sockets are looked at now and then.
      if (did && ++busy_rounds_ % kBusyRounds != 0) continue;
      Sleep(did);
    }
    for (Connection* c : Living()) c->dead = true;
    Reap();
  }

  // The connections, as a list that is stable while they are served.
  absl::Span<Connection* const> Living() {
    living_.clear();
    for (const auto& c : connections_) living_.push_back(c.get());
    return living_;
  }

  // Waits for sockets and doorbells; only looks when there was work.
  void Sleep(bool busy) {
    bool safe = !busy;
    absl::Time next = absl::InfiniteFuture();
    if (!busy) {
      for (const auto& c : connections_) {
        if (c->ring != nullptr) safe &= c->ring->PrepareSleep();
        if (!c->attached) next = std::min(next, c->since + kAttachTimeout);
      }
    }
    int timeout_ms = 0;
    if (safe) {
      const absl::Duration left = next - RealClock::Get().Now();
      timeout_ms = static_cast<int>(std::clamp<int64_t>(
          absl::ToInt64Milliseconds(std::min(left, absl::Seconds(60))) + 1, 0, 60'000));
    }
    epoll_event events[kEventsMax];
    const int ready = epoll_wait(epoll_.get(), events, kEventsMax, timeout_ms);
    if (!busy) {
      for (const auto& c : connections_) {
        if (c->ring != nullptr) c->ring->EndSleep();
      }
    }
    for (int i = 0; i < ready; ++i) OnEvent(events[i].data.fd);
    const absl::Time now = RealClock::Get().Now();
    for (const auto& c : connections_) {
      if (c->attached || now < c->since + kAttachTimeout) continue;
      forced_closes_.fetch_add(1, std::memory_order_relaxed);
      c->dead = true;
    }
  }

  void OnEvent(int fd) {
    uint64_t count = 0;
    if (fd == listener_.get()) return Accept();
    if (fd == wake_.get()) {
      (void)!read(fd, &count, sizeof(count));
      return;
    }
    for (const auto& c : connections_) {
      if (c->doorbell.get() == fd) {
        (void)!read(fd, &count, sizeof(count));
      } else if (c->socket.get() == fd) {
        OnSocket(*c);
      }
    }
  }

  void Accept() {
    absl::StatusOr<UniqueFd> socket = AcceptUnix(listener_.get());
    if (!socket.ok()) {
      if (absl::IsPermissionDenied(socket.status())) {
        attaches_refused_.fetch_add(1, std::memory_order_relaxed);
        KVT_LOG(kWarning, path_, ": ", socket.status().message());
      }
      return;
    }
    if (connections_.size() == kServerConnectionsMax) return;
    auto c = std::make_unique<Connection>();
    c->socket = std::move(*socket);
    c->since = RealClock::Get().Now();
    Watch(c->socket.get());
    connections_.push_back(std::move(c));
    connections_now_.store(static_cast<uint32_t>(connections_.size()), std::memory_order_relaxed);
  }

  void OnSocket(Connection& c) {
    if (c.dead) return;
    const absl::Time now = RealClock::Get().Now();
    const absl::StatusOr<FdMessage> message = ReceiveFdMessage(c.socket.get(), now);
    if (absl::IsDeadlineExceeded(message.status())) return;
    if (!message.ok() || c.attached) {
      // The client went; anything it says after its hello is malformed.
      if (message.ok() || absl::IsInvalidArgument(message.status())) {
        messages_refused_.fetch_add(1, std::memory_order_relaxed);
      }
      c.dead = true;
      return;
    }
    const absl::StatusOr<CheckedHello> hello =
        CheckAttachHello(message->bytes, TransportSettings{}, versions_);
    absl::Status status = hello.status();
    if (status.ok()) status = resolver_.Attach(hello->token);
    if (!status.ok()) {
      attaches_refused_.fetch_add(1, std::memory_order_relaxed);
      const AttachReply reply = MakeAttachReply(status, 0, 0, 0);
      (void)SendFdMessage(c.socket.get(), BytesOf(reply), {}, now);
      c.dead = true;
      return;
    }
    c.attached = true;
    c.session = hello->token.session;
    status = Admit(c, *hello);
    if (!status.ok()) {
      KVT_LOG(kInfo, path_, ": a client left while it was let in: ", status.message());
      c.dead = true;
    }
  }

  static absl::Span<const std::byte> BytesOf(const AttachReply& reply) {
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&reply), sizeof(reply));
  }

  absl::Status Admit(Connection& c, const CheckedHello& hello) {
    SharedMappingOptions options;
    options.receiver_writes = true;
    KVT_ASSIGN_OR_RETURN(SharedMapping ring,
                         SharedMapping::Create("kvtide-push-ring", kRingMappingBytes, options));
    c.doorbell = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    c.answered = UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!c.doorbell.valid() || !c.answered.valid()) {
      return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
    }
    const int fds[] = {arena_.fd(), table_.mapping().fd(), ring.fd(), c.doorbell.get(),
                       c.answered.get()};
    const AttachReply reply = MakeAttachReply(absl::OkStatus(), hello.version, 0, arena_.size());
    KVT_RETURN_IF_ERROR(SendFdMessage(c.socket.get(), BytesOf(reply), fds, RealClock::Get().Now()));
    Watch(c.doorbell.get());
    c.ring = std::make_unique<PushRingReader>(std::move(ring));
    c.applier = std::make_unique<PushApplier>(
        resolver_, c.session, hello.token.geometry.SliceBytes(), hello.version);
    return absl::OkStatus();
  }

  // Applies the client's next message. True when there was one.
  bool Serve(Connection& c) {
    if (c.ring == nullptr || c.dead) return false;
    const auto message = c.ring->Peek();
    absl::Status status = message.status();
    if (status.ok() && !message->has_value()) return false;
    if (status.ok()) status = Apply(c, **message);
    if (!status.ok()) {
      messages_refused_.fetch_add(1, std::memory_order_relaxed);
      KVT_LOG(kDebug, path_, ": client refused: ", status.message());
      c.dead = true;
    }
    return true;
  }

  absl::Status Apply(Connection& c, const PushRingReader::Message& message) {
    const RingMessage& header = message.header;
    const bool sums = header.has_checksums != 0;
    if (header.data_bytes > message.body.size() || header.count > kMessagePiecesMax) {
      return absl::InvalidArgumentError("push ring: message of a wrong size");
    }
    // The padding before the data is at most 63 bytes; the meta's size follows from the header.
    const auto count = static_cast<int>(header.count);
    const size_t front = message.body.size() - header.data_bytes;
    const size_t sums_bytes =
        sums ? header.data_bytes / c.applier->slice_bytes() * sizeof(uint64_t) : 0;
    const size_t meta = header.count * sizeof(Piece) + sums_bytes;
    if (front < meta || front - meta >= 64) {
      return absl::InvalidArgumentError("push ring: message of a wrong size");
    }
    KVT_RETURN_IF_ERROR(
        c.applier->MetaBytes(count, sums, header.data_bytes, meta + header.data_bytes).status());
    MessageStatuses statuses{};
    KVT_RETURN_IF_ERROR(c.applier->Apply(count, sums, message.body.subspan(0, meta),
                                         message.body.subspan(front), statuses));
    bytes_received_.fetch_add(header.data_bytes, std::memory_order_relaxed);
    bool wake = false;
    KVT_RETURN_IF_ERROR(c.ring->Answer(message, statuses, &wake));
    const uint64_t one = 1;
    if (wake) (void)!write(c.answered.get(), &one, sizeof(one));
    return absl::OkStatus();
  }

  void Reap() {
    for (size_t i = 0; i < connections_.size(); ++i) {
      Connection& c = *connections_[i];
      if (!c.dead) continue;
      if (c.attached) resolver_.Detach(c.session);
      connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(i--));
    }
    connections_now_.store(static_cast<uint32_t>(connections_.size()), std::memory_order_relaxed);
  }

  const std::string path_;
  const TransportVersions versions_;
  const SharedMapping& arena_;
  const RecordTable& table_;
  PieceResolver& resolver_;
  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::atomic<bool> stopping_{false};

  // Thread only.
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<Connection*> living_;
  uint32_t busy_rounds_ = 0;

  std::atomic<uint32_t> connections_now_{0};
  std::atomic<uint64_t> attaches_refused_{0}, messages_refused_{0}, forced_closes_{0};
  std::atomic<uint64_t> bytes_received_{0};
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TransportServer>> StartShmServer(const ShmServerOptions& options,
                                                                const SharedMapping& arena,
                                                                const RecordTable& table,
                                                                PieceResolver& resolver) {
  auto server = std::make_unique<ShmServer>(options, arena, table, resolver);
  KVT_RETURN_IF_ERROR(server->Start(options.cpu));
  return server;
}

}  // namespace kvt
