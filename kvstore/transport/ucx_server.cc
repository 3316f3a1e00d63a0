// The store's end of the data plane over UCX: see ucx_messages.h for the messages.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kvstore/transport/piece_copy.h"
#include "kvstore/transport/ucx_transport.h"
#include "kvstore/transport/ucx_worker.h"

namespace kvt {
namespace {

// Slots of data messages: those in flight and one that is staged (resolved and prefetched).
constexpr size_t kDataSlots = kMessagesInFlightMax + 1;
// Answers of a connection that are not sent: a client keeps at most so many messages in flight.
constexpr size_t kAnswerSlots = 32;

struct Connection;

struct DataSlot : UcxSlot {
  Connection* connection = nullptr;
  bool busy = false;
  absl::Time since;
  uint32_t held = 0;  // pieces resolved kOk, to be released
  uint32_t entries = 0;
  std::array<Piece, kMessagePiecesMax> pieces;
  std::array<ucp_dt_iov_t, kMessagePiecesMax> io;
};

struct AnswerSlot : UcxSlot {
  Connection* connection = nullptr;
  bool busy = false;
  absl::Time since;
  AttachReply reply;
};

struct PullWork {
  uint64_t request = 0;
  uint32_t count = 0;
  uint32_t next = 0;
  uint32_t next_byte = 0;
  std::unique_ptr<Piece[]> pieces;
};

class UcxServer;

struct Connection {
  UcxServer* server = nullptr;
  uint64_t id = 0;
  ucp_ep_h ep = nullptr;
  enum class State { kNew, kAttached, kClosing } state = State::kNew;
  bool close_begun = false;
  bool ep_closed = false;
  bool last_answer = false;  // closes when its answers are out (a refused attach)
  absl::Time since;
  SessionId session;
  bool attached = false;  // the resolver was told
  uint32_t slice_bytes = 0;
  uint16_t version = 0;
  uint64_t client_channel = 0;
  std::unique_ptr<PushApplier> applier;
  std::array<PullWork, kRequestsInFlightMax> pulls;  // ring
  size_t pulls_head = 0;
  size_t pulls_size = 0;
  std::array<DataSlot, kDataSlots> data;
  DataSlot* staged = nullptr;
  int data_in_flight = 0;
  std::array<AnswerSlot, kAnswerSlots> answers;
  int answers_in_flight = 0;
};

class UcxServer final : public TransportServer, public UcxClient {
 public:
  UcxServer(std::unique_ptr<UcxWorker> worker, absl::Span<std::byte> arena, PieceResolver& resolver)
      : worker_(std::move(worker)), arena_(arena), resolver_(resolver) {}
  ~UcxServer() override { Stop(); }

  absl::Status Listen(const UcxServerOptions& options);

  std::string Address() const override { return address_; }
  void Stop() override { worker_->Stop(std::exchange(arena_handle_, nullptr)); }
  TransportServerStats Stats() const override {
    TransportServerStats stats;
    stats.connections = connections_now_.load(std::memory_order_relaxed);
    stats.attaches_refused = attaches_refused_.load(std::memory_order_relaxed);
    stats.messages_refused = messages_refused_.load(std::memory_order_relaxed);
    stats.bytes_sent = bytes_sent_.load(std::memory_order_relaxed);
    stats.bytes_received = bytes_received_.load(std::memory_order_relaxed);
    stats.forced_closes = forced_closes_.load(std::memory_order_relaxed);
    return stats;
  }

  bool Poll(absl::Time now, bool woken) override;
  absl::Time NextTimer() const override;
  void OnMessage(const UcxReceived& message) override;
  void OnMalformed(ucp_ep_h reply_ep) override;
  bool Drained() const override { return stop_begun_ && connections_.empty(); }

 private:
  void OnConnect(ucp_conn_request_h request);
  void OnAttach(Connection& c, const UcxReceived& message);
  void OnPull(Connection& c, const UcxReceived& message);
  void OnPush(Connection& c, const UcxReceived& message);
  void OnCancel(Connection& c, const UcxReceived& message);
  void Refuse(Connection& c, absl::string_view why);
  bool Pump(Connection& c, absl::Time now);
  // Resolves the pieces of the next message; returns how many.
  uint32_t ResolveNext(Connection& c, const PullWork& work,
                       std::array<ResolvedPull, kMessagePiecesMax>& resolved);
  // The next message with its pieces' counts taken, or null.
  DataSlot* Stage(Connection& c);
  void SendData(Connection& c, DataSlot& slot, absl::Time now);
  void ReleaseHeld(DataSlot& slot);
  AnswerSlot* TakeAnswer(Connection& c);
  void SendAnswer(Connection& c, AnswerSlot& slot, const UcxPayload& payload);
  void BeginClose(Connection& c);
  bool EndIfClosed(Connection& c);
  absl::Time TimerOf(const Connection& c) const;
  static void OnDataSent(UcxSlot* self, ucs_status_t status);
  static void OnAnswerSent(UcxSlot* self, ucs_status_t status);

  std::unique_ptr<UcxWorker> worker_;
  const absl::Span<std::byte> arena_;
  PieceResolver& resolver_;
  std::string address_;
  ucp_mem_h arena_handle_ = nullptr;
  ucp_listener_h listener_ = nullptr;

  // Thread only.
  std::vector<std::unique_ptr<Connection>> connections_;
  absl::flat_hash_map<ucp_ep_h, Connection*> by_ep_;
  uint64_t next_id_ = 1;
  bool stop_begun_ = false;

  std::atomic<uint32_t> connections_now_{0};
  std::atomic<uint64_t> attaches_refused_{0}, messages_refused_{0}, forced_closes_{0};
  std::atomic<uint64_t> bytes_sent_{0}, bytes_received_{0};
};

absl::Status UcxServer::Listen(const UcxServerOptions& options) {
  // Registered once: RDMA devices then find it in their cache; TCP needs none.
  ucp_mem_map_params_t map{};
  map.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  map.address = arena_.data();
  map.length = arena_.size();
  ucs_status_t status = ucp_mem_map(worker_->context(), &map, &arena_handle_);
  if (status != UCS_OK) {
    arena_handle_ = nullptr;
    return UcxRegistrationError(arena_.size(), status);
  }
  const bool v6 = options.host.find(':') != std::string::npos;
  const std::string bind = v6 ? absl::StrCat("[", options.host, "]:", options.port)
                              : absl::StrCat(options.host, ":", options.port);
  KVT_ASSIGN_OR_RETURN(const UcxSocketAddress address, ParseSocketAddress(bind));
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address.storage);
  params.sockaddr.addrlen = address.size;
  params.conn_handler.arg = this;
  params.conn_handler.cb = [](ucp_conn_request_h request, void* self) {
    static_cast<UcxServer*>(self)->OnConnect(request);
  };
  status = ucp_listener_create(worker_->worker(), &params, &listener_);
  if (status != UCS_OK) return UcxError(absl::StrCat("ucx: listening on ", bind), status);
  ucp_listener_attr_t attr{};
  attr.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucp_listener_query(listener_, &attr);
  if (status != UCS_OK) ucp_listener_destroy(std::exchange(listener_, nullptr));
  if (status != UCS_OK) return UcxError(absl::StrCat("ucx: listening on ", bind), status);
  address_ = absl::StrCat("ucx:", FormatSocketAddress(attr.sockaddr));
  worker_->Start(*this);
  return absl::OkStatus();
}

void UcxServer::OnConnect(ucp_conn_request_h request) {
  if (stop_begun_ || connections_.size() >= kServerConnectionsMax) {
    (void)ucp_listener_reject(listener_, request);
    return;
  }
  auto connection = std::make_unique<Connection>();
  Connection& c = *connection;
  c.server = this;
  c.id = next_id_++;
  c.since = RealClock::Get().Now();
  for (DataSlot& slot : c.data) {
    slot.connection = &c;
    slot.sent = &OnDataSent;
  }
  for (AnswerSlot& slot : c.answers) {
    slot.connection = &c;
    slot.sent = &OnAnswerSent;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.conn_request = request;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.arg = &c;
  params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t) {
    auto* lost = static_cast<Connection*>(self);
    lost->server->BeginClose(*lost);
  };
  const ucs_status_t status = ucp_ep_create(worker_->worker(), &params, &c.ep);
  if (status != UCS_OK) {
    KVT_LOG(kInfo, "ucx: a client left while it was accepted: ", ucs_status_string(status));
    return;
  }
  by_ep_[c.ep] = &c;
  connections_.push_back(std::move(connection));
  connections_now_.store(static_cast<uint32_t>(connections_.size()), std::memory_order_relaxed);
}

void UcxServer::OnMalformed(ucp_ep_h reply_ep) {
  const auto it = by_ep_.find(reply_ep);
  if (it == by_ep_.end()) {
    messages_refused_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  Refuse(*it->second, "not a kvtide message");
}

void UcxServer::OnMessage(const UcxReceived& message) {
  const auto it = by_ep_.find(message.reply_ep);
  if (it == by_ep_.end()) {
    messages_refused_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  Connection& c = *it->second;
  if (c.state == Connection::State::kClosing || c.last_answer) return;
  if (message.header.type == UcxMessageType::kAttach) return OnAttach(c, message);
  // A connection's id is valid on its own endpoint only.
  if (c.state != Connection::State::kAttached || message.header.channel != c.id) {
    return Refuse(c, "message before attach or of another connection");
  }
  switch (message.header.type) {
    case UcxMessageType::kPull:
      return OnPull(c, message);
    case UcxMessageType::kPush:
      return OnPush(c, message);
    case UcxMessageType::kCancel:
      return OnCancel(c, message);
    case UcxMessageType::kAttach:
    case UcxMessageType::kAttachReply:
    case UcxMessageType::kPullData:
    case UcxMessageType::kPushAck:
      break;
  }
  Refuse(c, "message of an unknown type");
}

void UcxServer::Refuse(Connection& c, absl::string_view why) {
  messages_refused_.fetch_add(1, std::memory_order_relaxed);
  KVT_LOG(kDebug, "ucx: connection ", c.id, " refused: ", why);
  BeginClose(c);
}

void UcxServer::OnAttach(Connection& c, const UcxReceived& message) {
  if (c.state != Connection::State::kNew) return Refuse(c, "second attach");
  if (message.payload.size() >= sizeof(AttachHello)) {
    AttachHello claimed;
    std::memcpy(&claimed, message.payload.data(), sizeof(claimed));
    c.client_channel = claimed.channel;
  }
  absl::Status status;
  const absl::StatusOr<CheckedHello> hello =
      CheckAttachHello(message.payload, UcxSettings(), worker_->options().versions);
  status = hello.status();
  if (status.ok()) status = resolver_.Attach(hello->token);
  if (status.ok()) {
    c.state = Connection::State::kAttached;
    c.attached = true;
    c.session = hello->token.session;
    c.slice_bytes = hello->token.geometry.SliceBytes();
    c.version = hello->version;
    c.applier = std::make_unique<PushApplier>(resolver_, c.session, c.slice_bytes, c.version);
    for (PullWork& work : c.pulls) work.pieces = std::make_unique<Piece[]>(kRequestPiecesMax);
  } else {
    attaches_refused_.fetch_add(1, std::memory_order_relaxed);
    c.last_answer = true;
  }
  AnswerSlot* slot = TakeAnswer(c);
  KVT_CHECK(slot != nullptr);
  slot->reply = MakeAttachReply(status, c.version, c.id, arena_.size());
  slot->header.type = UcxMessageType::kAttachReply;
  UcxPayload payload;
  payload.data = &slot->reply;
  payload.size = sizeof(slot->reply);
  SendAnswer(c, *slot, payload);
}

void UcxServer::OnPull(Connection& c, const UcxReceived& message) {
  const uint32_t count = message.header.count;
  if (count < 1 || count > static_cast<uint32_t>(kRequestPiecesMax) ||
      message.payload.size() != count * sizeof(Piece)) {
    return Refuse(c, "malformed pull");
  }
  if (c.pulls_size == c.pulls.size()) return Refuse(c, "more pulls than agreed");
  PullWork& work = c.pulls[(c.pulls_head + c.pulls_size) % c.pulls.size()];
  std::memcpy(work.pieces.get(), message.payload.data(), message.payload.size());
  for (uint32_t i = 0; i < count; ++i) {
    const Piece& piece = work.pieces[i];
    if (piece.length == 0 || piece.length % kPieceAlignment != 0 ||
        piece.offset % kPieceAlignment != 0 || piece.reserved != 0) {
      return Refuse(c, "malformed piece");
    }
  }
  work.request = message.header.request;
  work.count = count;
  work.next = 0;
  work.next_byte = 0;
  ++c.pulls_size;
}

void UcxServer::OnCancel(Connection& c, const UcxReceived& message) {
  // The client still counts on an end of the answer: the rest becomes "not attempted".
  for (size_t i = 0; i < c.pulls_size; ++i) {
    PullWork& work = c.pulls[(c.pulls_head + i) % c.pulls.size()];
    if (work.request != message.header.request) continue;
    for (uint32_t p = work.next + (work.next_byte > 0 ? 1 : 0); p < work.count; ++p) {
      work.pieces[p].reserved = 1;
    }
  }
}

void UcxServer::OnPush(Connection& c, const UcxReceived& message) {
  const UcxHeader& header = message.header;
  const auto count = static_cast<int>(std::min<uint32_t>(header.count, 1u << 20));
  const bool sums = header.has_checksums != 0;
  const absl::StatusOr<size_t> meta =
      c.applier->MetaBytes(count, sums, header.bytes, message.payload.size());
  if (!meta.ok()) return Refuse(c, meta.status().message());
  AnswerSlot* slot = TakeAnswer(c);
  if (slot == nullptr) return Refuse(c, "more pushes than agreed");
  const absl::Status applied =
      c.applier->Apply(count, sums, message.payload.subspan(0, *meta),
                       message.payload.subspan(*meta), slot->header.statuses);
  if (!applied.ok()) {
    slot->busy = false;
    return Refuse(c, applied.message());
  }
  bytes_received_.fetch_add(header.bytes, std::memory_order_relaxed);
  slot->header.type = UcxMessageType::kPushAck;
  slot->header.request = header.request;
  slot->header.count = header.count;
  SendAnswer(c, *slot, UcxPayload{});
}

AnswerSlot* UcxServer::TakeAnswer(Connection& c) {
  for (AnswerSlot& slot : c.answers) {
    if (slot.busy) continue;
    slot.busy = true;
    slot.header = UcxHeader{};
    slot.header.channel = c.client_channel;
    return &slot;
  }
  return nullptr;
}

void UcxServer::SendAnswer(Connection& c, AnswerSlot& slot, const UcxPayload& payload) {
  slot.since = RealClock::Get().Now();
  ++c.answers_in_flight;
  UcxSendMessage(c.ep, slot, payload, UcxReply::kNone);
}

void UcxServer::OnAnswerSent(UcxSlot* self, ucs_status_t status) {
  auto& slot = *static_cast<AnswerSlot*>(self);
  slot.busy = false;
  --slot.connection->answers_in_flight;
  if (status != UCS_OK) slot.connection->server->BeginClose(*slot.connection);
}

uint32_t UcxServer::ResolveNext(Connection& c, const PullWork& work,
                                std::array<ResolvedPull, kMessagePiecesMax>& resolved) {
  // As many pieces as fit, the last perhaps in part.
  uint64_t wanted = 0;
  uint32_t count = 0;
  while (work.next + count < work.count && count < kMessagePiecesMax && wanted < kMessageBytesMax) {
    const uint32_t from = count == 0 ? work.next_byte : 0;
    wanted += work.pieces[work.next + count].length - from;
    ++count;
  }
  // A cancelled piece is not resolved; its mark is ours, not the client's.
  resolved.fill(ResolvedPull{nullptr, PieceStatus::kNotAttempted});
  const Piece* pieces = &work.pieces[work.next];
  if (pieces[0].reserved == 0) {
    resolver_.ResolvePull(c.session, absl::MakeConstSpan(pieces, count),
                          absl::MakeSpan(resolved.data(), count));
  }
  return count;
}

DataSlot* UcxServer::Stage(Connection& c) {
  if (c.pulls_size == 0) return nullptr;
  const auto free = std::find_if(c.data.begin(), c.data.end(),
                                 [](const DataSlot& slot) { return !slot.busy; });
  if (free == c.data.end()) return nullptr;
  DataSlot& slot = *free;
  PullWork& work = c.pulls[c.pulls_head];
  slot.busy = true;
  slot.held = 0;
  slot.entries = 0;
  slot.header = UcxHeader{};
  UcxHeader& header = slot.header;
  header.type = UcxMessageType::kPullData;
  header.channel = c.client_channel;
  header.request = work.request;
  header.first = work.next;
  header.skip = work.next_byte;

  std::array<ResolvedPull, kMessagePiecesMax> resolved;
  const uint32_t count = ResolveNext(c, work, resolved);
  for (uint32_t i = 0; i < count; ++i) {
    const Piece& piece = work.pieces[work.next];
    header.statuses[i] = VerdictIn(c.version, resolved[i].status);
    if (resolved[i].status == PieceStatus::kOk) {
      const uint32_t room = (kMessageBytesMax - header.bytes) / c.slice_bytes * c.slice_bytes;
      const uint32_t left = piece.length - work.next_byte;
      const uint32_t take = left <= kMessageBytesMax - header.bytes ? left : room;
      if (take == 0) {  // the next message begins with it
        resolver_.ReleasePull(c.session, absl::MakeConstSpan(&piece, 1));
        break;
      }
      slot.pieces[slot.held++] = piece;
      const std::byte* data = resolved[i].data + work.next_byte;
      slot.io[slot.entries].buffer = const_cast<std::byte*>(data);
      slot.io[slot.entries++].length = take;
      PrefetchPiece(data, take);
      header.bytes += take;
      if (take < left) {
        KVT_CHECK(i + 1 == count, "a split piece is the last");
        ++header.count;
        work.next_byte += take;
        return &slot;
      }
    }
    ++header.count;
    ++work.next;
    work.next_byte = 0;
  }
  if (work.next == work.count) {
    c.pulls_head = (c.pulls_head + 1) % c.pulls.size();
    --c.pulls_size;
  }
  return &slot;
}

bool UcxServer::Pump(Connection& c, absl::Time now) {
  bool did = false;
  while (c.state == Connection::State::kAttached && c.data_in_flight < kMessagesInFlightMax) {
    DataSlot* slot = std::exchange(c.staged, nullptr);
    if (slot == nullptr) slot = Stage(c);
    if (slot == nullptr) break;
    c.staged = Stage(c);
    SendData(c, *slot, now);
    did = true;
  }
  return did;
}

void UcxServer::SendData(Connection& c, DataSlot& slot, absl::Time now) {
  slot.since = now;
  ++c.data_in_flight;
  bytes_sent_.fetch_add(slot.header.bytes, std::memory_order_relaxed);
  UcxPayload payload;
  payload.io_vector = slot.io.data();
  payload.io_count = slot.entries;
  UcxSendMessage(c.ep, slot, payload, UcxReply::kNone);
}

void UcxServer::ReleaseHeld(DataSlot& slot) {
  if (slot.held > 0) {
    resolver_.ReleasePull(slot.connection->session,
                          absl::MakeConstSpan(slot.pieces.data(), slot.held));
  }
  slot.held = 0;
  slot.busy = false;
}

void UcxServer::OnDataSent(UcxSlot* self, ucs_status_t status) {
  auto& slot = *static_cast<DataSlot*>(self);
  Connection& c = *slot.connection;
  --c.data_in_flight;
  c.server->ReleaseHeld(slot);
  if (status != UCS_OK) c.server->BeginClose(c);
}

void UcxServer::BeginClose(Connection& c) {
  if (c.state == Connection::State::kClosing) return;
  c.state = Connection::State::kClosing;
  worker_->Wake();  // Poll closes the endpoint: not within one of its callbacks
}

bool UcxServer::EndIfClosed(Connection& c) {
  if (!c.close_begun) {
    c.close_begun = true;
    if (c.staged != nullptr) ReleaseHeld(*std::exchange(c.staged, nullptr));
    by_ep_.erase(c.ep);
    UcxForceClose(
        *worker_, c.ep,
        [](void* self) {
          auto* connection = static_cast<Connection*>(self);
          connection->ep_closed = true;
          connection->server->worker_->Wake();
        },
        &c);
  }
  if (!c.ep_closed || c.data_in_flight > 0 || c.answers_in_flight > 0) return false;
  if (c.attached) resolver_.Detach(c.session);
  return true;
}

absl::Time UcxServer::TimerOf(const Connection& c) const {
  absl::Time next = absl::InfiniteFuture();
  if (c.state == Connection::State::kClosing) return next;
  if (c.state == Connection::State::kNew) next = c.since + kAttachTimeout;
  if (c.data_in_flight > 0) {
    for (const DataSlot& slot : c.data) {
      if (slot.busy && &slot != c.staged) next = std::min(next, slot.since + kServerSendTimeout);
    }
  }
  if (c.answers_in_flight > 0) {
    for (const AnswerSlot& slot : c.answers) {
      if (slot.busy) next = std::min(next, slot.since + kServerSendTimeout);
    }
  }
  return next;
}

absl::Time UcxServer::NextTimer() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& c : connections_) next = std::min(next, TimerOf(*c));
  return next;
}

bool UcxServer::Poll(absl::Time now, bool woken) {
  bool did = false;
  if (woken && worker_->stopping() && !stop_begun_) {
    stop_begun_ = true;
    ucp_listener_destroy(std::exchange(listener_, nullptr));
    for (const auto& c : connections_) BeginClose(*c);
  }
  for (size_t i = 0; i < connections_.size(); ++i) {
    Connection& c = *connections_[i];
    if (c.state == Connection::State::kAttached) did |= Pump(c, now);
    if (c.last_answer && c.answers_in_flight == 0) {
      // The client closes when it has read the refusal; this is for one that does not.
      if (now >= c.since + kAttachTimeout) BeginClose(c);
    } else if (now >= TimerOf(c)) {
      forced_closes_.fetch_add(1, std::memory_order_relaxed);
      BeginClose(c);
    }
    if (c.state == Connection::State::kClosing && EndIfClosed(c)) {
      connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(i--));
      connections_now_.store(static_cast<uint32_t>(connections_.size()), std::memory_order_relaxed);
      did = true;
    }
  }
  return did;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TransportServer>> StartUcxServer(const UcxServerOptions& options,
                                                                absl::Span<std::byte> arena,
                                                                PieceResolver& resolver) {
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<UcxWorker> worker, UcxWorker::Create(options.ucx));
  auto server = std::make_unique<UcxServer>(std::move(worker), arena, resolver);
  KVT_RETURN_IF_ERROR(server->Listen(options));
  return server;
}

}  // namespace kvt
