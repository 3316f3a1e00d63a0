// What a link does on the call pool: session, renewal, data channel. The rest: store_link.cc.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kvstore/client/host_id.h"
#include "kvstore/client/store_link.h"

namespace kvt {
namespace {

// "ucx" + "host:port" -> "ucx:host:port", also when it stands there already.
std::string WithScheme(absl::string_view scheme, const std::string& address) {
  const std::string prefix = absl::StrCat(scheme, ":");
  return absl::StartsWith(address, prefix) ? address : absl::StrCat(prefix, address);
}

}  // namespace

void StoreLink::StartJob(void (StoreLink::*job)()) {
  ++jobs_;
  const bool queued = calls_.TryRun([this, job] {
    (this->*job)();
    MutexLock lock(mu_);
    --jobs_;
    changed_.NotifyAll();
  });
  if (queued) return;
  --jobs_;
  if (state_ == State::kConnecting) state_ = State::kDown;
}

void StoreLink::ConnectJob() {
  CloseDropped();
  const absl::Status status = Connect();
  MutexLock lock(mu_);
  attempted_ = true;
  if (status.ok()) {
    if (told_down_) KVT_LOG(kInfo, "store ", name_, " is back over ", scheme_);
    told_down_ = false;
    state_ = State::kUp;
    failures_in_row_ = 0;
    up_since_ = clock_.Now();
    changed_.NotifyAll();
    return;
  }
  CountFailure(status);
  if (!told_down_ && wanted_) {
    KVT_LOG(kWarning, "store ", name_, " cannot be used: ", status.message(),
            "; its blocks count as absent until it answers");
    told_down_ = true;
  }
  GoDown(clock_.Now() + TakePause());
  changed_.NotifyAll();
}

absl::Status StoreLink::Connect() {
  std::shared_ptr<StoreApi> api;
  bool has_session = false;
  std::string address;
  {
    MutexLock lock(mu_);
    if (closing_) return absl::CancelledError("closing");
    api = api_;
    has_session = has_session_;
    address = store_.control_address;
  }
  if (api == nullptr) {
    api = config_.connect_store(address);
    MutexLock lock(mu_);
    api_ = api;
  }
  if (has_session) {
    const absl::Status renewed = Renew(*api);
    has_session = renewed.ok();
    if (!renewed.ok() && !absl::IsNotFound(renewed)) return renewed;
  }
  if (!has_session) KVT_RETURN_IF_ERROR(OpenSession(*api));
  OpenSessionReply session;
  {
    MutexLock lock(mu_);
    if (!has_session_) return last_failure_;
    if (channel_ != nullptr && channel_->IsOpen()) return absl::OkStatus();
    DropChannel();
    session = session_;
  }
  CloseDropped();
  absl::StatusOr<Attach> attach = OpenChannel(session);
  if (!attach.ok()) {
    // The session may be gone at the store: the next attempt opens a new one.
    MutexLock lock(mu_);
    if (absl::IsPermissionDenied(attach.status())) LoseSession("it refused the data channel");
    return attach.status();
  }
  MutexLock lock(mu_);
  if (!has_session_ || session_.session != session.session) {
    dropped_.push_back(std::move(attach->channel));  // the session was lost on the way
    return last_failure_;
  }
  channel_ = std::move(attach->channel);
  scheme_ = attach->scheme;
  ++channel_serial_;
  return absl::OkStatus();
}

absl::Status StoreLink::OpenSession(StoreApi& api) {
  OpenSessionRequest request;
  request.worker = config_.worker;
  request.worker_epoch = config_.worker_epoch;
  request.versions = config_.versions;
  request.geometry = config_.model.geometry;
  request.model_fingerprint = config_.model.fingerprint;
  request.numerics_id = config_.model.numerics_id;
  const absl::Time asked = clock_.Now();
  absl::StatusOr<OpenSessionReply> reply = api.OpenSession(request);
  if (!reply.ok()) return reply.status();
  if (reply->wire_version < config_.versions.min || reply->wire_version > config_.versions.max) {
    return absl::FailedPreconditionError(absl::StrCat(
        "store ", name_, " chose wire version ", reply->wire_version, ", ", config_.worker,
        " speaks ", config_.versions.min, " to ", config_.versions.max));
  }
  if (reply->secret.size() != std::tuple_size_v<SessionSecret>) {
    return absl::InternalError(absl::StrCat("store ", name_, ": a session secret of ",
                                            reply->secret.size(), " bytes"));
  }
  MutexLock lock(mu_);
  session_ = *std::move(reply);
  has_session_ = true;
  live_.clear();  // tickets of the old session have nothing in this one
  lease_end_ = asked + session_.lease;
  renew_at_ = asked + session_.lease / 3;
  ++sessions_opened_;
  return absl::OkStatus();
}

void StoreLink::DisconnectJob() {
  std::shared_ptr<StoreApi> api;
  SessionId session;
  {
    MutexLock lock(mu_);
    if (wanted_ || !live_.empty() || !has_session_) return;
    api = api_;
    session = session_.session;
    LoseSession("no view names it and no ticket lives there");
  }
  CloseDropped();
  if (api != nullptr) api->CloseSession(session).IgnoreError();
}

void StoreLink::RenewJob() {
  std::shared_ptr<StoreApi> api;
  {
    MutexLock lock(mu_);
    if (closing_ || !has_session_) return;
    api = api_;
  }
  if (api == nullptr) return;
  const absl::Status status = Renew(*api);
  if (status.ok() || absl::IsNotFound(status)) return;
  MutexLock lock(mu_);
  CountFailure(status);
}

// Renews the session and handles its loss; other failures are the caller's.
absl::Status StoreLink::Renew(StoreApi& api) {
  RenewRequest request;
  absl::Time asked;
  {
    MutexLock lock(mu_);
    request.session = session_.session;
    for (const auto& [id, epoch] : live_) {
      request.live.push_back(TicketRef{TicketId(id), TicketEpoch(epoch)});
    }
    renewing_ = true;
    asked = clock_.Now();
  }
  const absl::StatusOr<RenewReply> reply = api.Renew(request);
  MutexLock lock(mu_);
  renewing_ = false;
  changed_.NotifyAll();
  if (reply.ok()) {
    lease_end_ = std::max(lease_end_, asked + reply->lease);
    renew_at_ = asked + reply->lease / 3;
    failures_in_row_ = 0;
  } else if (absl::IsNotFound(reply.status())) {
    LoseSession("it no longer knows this session");
  } else {
    renew_at_ = clock_.Now() + std::max(session_.lease / 20, absl::Milliseconds(50));
  }
  return reply.status();
}

absl::StatusOr<StoreLink::Attach> StoreLink::OpenChannel(const OpenSessionReply& reply) {
  SessionToken token;
  token.session = reply.session;
  std::memcpy(token.secret.data(), reply.secret.data(), token.secret.size());
  token.geometry = config_.model.geometry;
  if (absl::StartsWith(reply.ucx_address, "loopback:")) {
    return Attempt("loopback", reply.ucx_address, token);
  }
  const TierTransport wish = config_.options.transport;
  const std::string host = LocalHostId();
  const bool same_host = !host.empty() && host == reply.host_id;
  absl::Status failure = absl::FailedPreconditionError(absl::StrCat(
      "store ", name_, " and this worker have no data plane in common: transport = ",
      wish == TierTransport::kAuto ? "auto" : wish == TierTransport::kUcx ? "ucx" : "shm",
      "; the store serves ", reply.ucx_address.empty() ? "no UCX" : "UCX", " and ",
      reply.shm_socket.empty() ? "no shared memory" : "shared memory",
      same_host ? " on this host" : " on another host"));
  if (wish != TierTransport::kUcx && same_host && !reply.shm_socket.empty() &&
      FindTransport("shm") != nullptr) {
    absl::StatusOr<Attach> shm = Attempt("shm", WithScheme("shm", reply.shm_socket), token);
    if (shm.ok() || wish == TierTransport::kShm) return shm;
    failure = shm.status();
  }
  if (wish != TierTransport::kShm && !reply.ucx_address.empty() &&
      FindTransport("ucx") != nullptr) {
    return Attempt("ucx", WithScheme("ucx", reply.ucx_address), token);
  }
  return failure;
}

absl::StatusOr<StoreLink::Attach> StoreLink::Attempt(absl::string_view scheme,
                                                     const std::string& address,
                                                     const SessionToken& token) {
  Transport* transport = FindTransport(scheme);
  if (transport == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("store ", name_, ": this worker has no ", scheme, " transport"));
  }
  const absl::Time deadline = RealClock::Get().Now() + config_.options.connect_timeout;
  auto channel = transport->Connect(address, token, deadline);
  if (!channel.ok()) return channel.status();
  return Attach{*std::move(channel), std::string(scheme)};
}

Transport* StoreLink::FindTransport(absl::string_view scheme) const {
  for (Transport* transport : config_.transports) {
    if (transport->Scheme() == scheme) return transport;
  }
  return nullptr;
}

}  // namespace kvt
