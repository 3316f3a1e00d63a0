// State, bursts and the breaker. What runs on the call pool: store_link_jobs.cc.
#include "kvstore/client/store_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace kvt {
namespace {

// A link that is up and idle is looked at so often, for a channel that closed; every other link more often.
constexpr absl::Duration kTickUp = absl::Milliseconds(500);
constexpr absl::Duration kTickMax = absl::Milliseconds(200);
// A new ticket waits for a renewal under way; a store that takes longer is slow, and skipped.
constexpr absl::Duration kRenewWaitMax = absl::Milliseconds(300);

// The store could not be reached, as opposed to: it answered with a refusal.
bool IsUnreachable(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsCancelled(status) || absl::IsUnknown(status) || absl::IsInternal(status);
}

std::pair<uint64_t, uint32_t> LiveKey(TicketRef ticket) {
  return {ticket.id.value(), ticket.epoch.value()};
}

}  // namespace

StoreLink::StoreLink(const TierClientConfig& config, StoreRef store, CallPool& calls,
                     const Clock& clock)
    : config_(config),
      name_(store.name),
      calls_(calls),
      clock_(clock),
      store_(std::move(store)),
      pause_(config.options.breaker_pause),
      connect_at_(clock.Now()),
      last_failure_(absl::UnavailableError(absl::StrCat("store ", name_, ": not connected yet"))) {}

StoreLink::~StoreLink() { Close(); }

void StoreLink::SetStore(const StoreRef& store) {
  MutexLock lock(mu_);
  const bool restarted = store.epoch != store_.epoch && has_session_ &&
                         store.epoch != session_.store_epoch;
  if (store.control_address != store_.control_address) api_ = nullptr;
  store_ = store;
  if (restarted) LoseSession("it restarted");
}

void StoreLink::SetWanted(bool wanted) {
  MutexLock lock(mu_);
  if (wanted_ && !wanted) unwanted_since_ = clock_.Now();
  wanted_ = wanted;
}

absl::Time StoreLink::Tick(absl::Time now) {
  MutexLock lock(mu_);
  if (closing_) return now + kTickMax;
  if (has_session_ && now > lease_end_) LoseSession("its lease ended");
  if (state_ == State::kUp && (!has_session_ || channel_ == nullptr || !channel_->IsOpen())) {
    if (has_session_) {
      last_failure_ =
          absl::UnavailableError(absl::StrCat("store ", name_, ": the data channel closed"));
    }
    GoDownFromUp(now);
  }
  if (state_ == State::kUp && IsSettled(now)) pause_ = config_.options.breaker_pause;
  const bool idle = jobs_ == 0;
  const bool needed = wanted_ || !live_.empty();
  if (idle && state_ == State::kDown && needed && now >= connect_at_) {
    state_ = State::kConnecting;
    StartJob(&StoreLink::ConnectJob);
  } else if (idle && has_session_ && !needed && now >= unwanted_since_ + session_.lease) {
    StartJob(&StoreLink::DisconnectJob);
  } else if (idle && has_session_ && state_ == State::kUp && now >= renew_at_) {
    StartJob(&StoreLink::RenewJob);
  } else if (idle && !dropped_.empty()) {
    StartJob(&StoreLink::CloseDropped);
  }
  if (jobs_ > 0) return now + kTickMax;  // what is due waits for the job under way
  if (state_ == State::kUp) return std::min(NextOnGrid(now, kTickUp), std::max(now, renew_at_));
  if (state_ == State::kDown && needed) return std::min(now + kTickMax, std::max(now, connect_at_));
  return now + kTickMax;
}

bool StoreLink::IsWanted() const {
  MutexLock lock(mu_);
  return wanted_;
}

absl::Status StoreLink::UpStatus() const {
  MutexLock lock(mu_);
  return IsUpLocked() ? absl::OkStatus() : last_failure_;
}

bool StoreLink::IsUp() const {
  MutexLock lock(mu_);
  return IsUpLocked();
}

bool StoreLink::IsUpLocked() const {
  return state_ == State::kUp && has_session_ && channel_ != nullptr && channel_->IsOpen() &&
         clock_.Now() <= lease_end_;
}

void StoreLink::AwaitFirstAttempt(absl::Time deadline) {
  {
    MutexLock lock(mu_);
    if (attempted_) return;
  }
  (void)Tick(clock_.Now());
  MutexLock lock(mu_);
  while (!attempted_ && state_ == State::kConnecting) {
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) return;
    changed_.WaitFor(mu_, left);
  }
}

absl::StatusOr<LinkSession> StoreLink::BeginCall(TicketRef ticket, absl::Time deadline) {
  deadline = std::min(deadline, RealClock::Get().Now() + kRenewWaitMax);
  MutexLock lock(mu_);
  while (renewing_ && !live_.contains(LiveKey(ticket))) {
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("store ", name_, ": a renewal is under way"));
    }
    changed_.WaitFor(mu_, left);
  }
  if (!IsUpLocked()) return last_failure_;
  live_.insert(LiveKey(ticket));
  ++calling_[LiveKey(ticket)];
  return LinkSession{api_, session_.session, incarnation_, ticket};
}

absl::StatusOr<LinkSession> StoreLink::CurrentSession() const {
  MutexLock lock(mu_);
  if (!has_session_ || api_ == nullptr) return last_failure_;
  return LinkSession{api_, session_.session, incarnation_, std::nullopt};
}

void StoreLink::EndCall(const LinkSession& session, const absl::Status& status) {
  {
    MutexLock lock(mu_);
    const bool forgotten = session.ticket.has_value() && EndsForgotten(*session.ticket);
    if (session.incarnation != incarnation_) return;
    if (absl::IsNotFound(status)) {
      LoseSession("it no longer knows this session");
    } else if (IsUnreachable(status)) {
      CountFailure(status);
    } else {
      failures_in_row_ = 0;
    }
    if (!forgotten || closing_) return;
  }
  // If it cannot be sent, the next renewal does not list the ticket.
  (void)calls_.TryRun([session] {
    session.api->Release(ReleaseRequest{session.session, *session.ticket}).IgnoreError();
  });
}

void StoreLink::NoteUnanswered(uint64_t incarnation) {
  MutexLock lock(mu_);
  if (incarnation != incarnation_) return;
  CountFailure(absl::DeadlineExceededError("no answer to a lookup in time"));
}

bool StoreLink::EndsForgotten(const TicketRef& ticket) {
  const auto it = calling_.find(LiveKey(ticket));
  KVT_CHECK(it != calling_.end(), "ticket ", ticket.id.value(), ": EndCall without BeginCall");
  if (--it->second > 0) return false;
  calling_.erase(it);
  return !live_.contains(LiveKey(ticket));
}

bool StoreLink::Forget(TicketRef ticket) {
  MutexLock lock(mu_);
  return live_.erase(LiveKey(ticket)) > 0;
}

void StoreLink::Submit(LinkBurst burst) {
  std::shared_ptr<Channel> channel;
  uint64_t serial = 0;
  PieceStatus why = PieceStatus::kNotAttempted;
  {
    MutexLock lock(mu_);
    why = Verdict(burst.incarnation);
    const bool usable = why == PieceStatus::kOk;
    if (usable && in_flight_ >= kLinkBurstsMax && pending_.size() < kLinkPendingMax) {
      pending_.push_back(std::move(burst));
      return;
    }
    if (usable && in_flight_ < kLinkBurstsMax) {
      channel = channel_;
      serial = channel_serial_;
      ++in_flight_;
    }
  }
  if (channel == nullptr) {
    burst.fail(why == PieceStatus::kOk ? PieceStatus::kNotAttempted : why);
    return;
  }
  const bool accepted = burst.submit(*channel, serial).ok();
  GiveBack(std::move(channel));
  if (accepted) return;
  burst.fail(PieceStatus::kNotAttempted);
  BurstEnded();
}

PieceStatus StoreLink::Verdict(uint64_t incarnation) const {
  if (incarnation != incarnation_ || clock_.Now() > lease_end_) return PieceStatus::kExpired;
  return closing_ || channel_ == nullptr ? PieceStatus::kNotAttempted : PieceStatus::kOk;
}

void StoreLink::BurstEnded() {
  // Every turn ends one burst and tries to start one in its place.
  while (true) {
    LinkBurst burst;
    std::shared_ptr<Channel> channel;
    uint64_t serial = 0;
    PieceStatus why = PieceStatus::kNotAttempted;
    {
      MutexLock lock(mu_);
      --in_flight_;
      if (pending_.empty()) return;
      burst = std::move(pending_.front());
      pending_.pop_front();
      ++in_flight_;
      why = Verdict(burst.incarnation);
      if (why == PieceStatus::kOk) channel = channel_;
      serial = channel_serial_;
    }
    bool accepted = false;
    if (channel != nullptr) {
      const bool late = RealClock::Get().Now() >= burst.deadline;
      accepted = !late && burst.submit(*channel, serial).ok();
      GiveBack(std::move(channel));
    }
    if (accepted) return;
    burst.fail(why == PieceStatus::kOk ? PieceStatus::kNotAttempted : why);
  }
}

void StoreLink::GiveBack(std::shared_ptr<Channel> channel) {
  MutexLock lock(mu_);
  if (channel != channel_) dropped_.push_back(std::move(channel));
  channel = nullptr;  // under the lock, while the link holds another reference
}

void StoreLink::CancelBurst(uint64_t channel_serial, BurstId burst) {
  std::shared_ptr<Channel> channel;
  {
    MutexLock lock(mu_);
    if (channel_serial == channel_serial_) channel = channel_;
  }
  if (channel == nullptr) return;
  channel->Cancel(burst);
  GiveBack(std::move(channel));
}

void StoreLink::NotePull(bool disk, uint64_t bytes, absl::Duration took, absl::Time now) {
  MutexLock lock(rates_mu_);
  (disk ? disk_rate_ : memory_rate_).Add(bytes, took, now);
}

PullRates StoreLink::Rates() const {
  const absl::Time now = RealClock::Get().Now();
  MutexLock lock(rates_mu_);
  return {memory_rate_.PerSecond(now), disk_rate_.PerSecond(now)};
}

StoreLinkFigures StoreLink::Figures() const {
  StoreLinkFigures f;
  const auto get = [](const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  f.name = name_;
  f.lookups = get(counters_.lookups);
  f.lookup_blocks = get(counters_.lookup_blocks);
  f.hit_blocks = get(counters_.hit_blocks);
  f.reserved_blocks = get(counters_.reserved_blocks);
  f.refused = get(counters_.refused);
  f.pulled_bytes = get(counters_.pulled_bytes);
  f.pushed_bytes = get(counters_.pushed_bytes);
  f.pull_bursts = get(counters_.pull_bursts);
  f.push_bursts = get(counters_.push_bursts);
  f.lost_pieces = get(counters_.lost_pieces);
  f.corrupt_pieces = get(counters_.corrupt_pieces);
  f.expired_pieces = get(counters_.expired_pieces);
  f.disk_bytes = get(counters_.disk_bytes);
  f.promote_calls = get(counters_.promote_calls);
  MutexLock lock(mu_);
  f.state = IsUpLocked() ? "up" : state_ == State::kConnecting ? "connecting" : "down";
  f.transport = channel_ == nullptr ? "" : scheme_;
  f.sessions_opened = sessions_opened_;
  f.failures = failures_;
  f.breaker_opened = breaker_opened_;
  f.live_tickets = live_.size();
  return f;
}

void StoreLink::Close() {
  std::vector<LinkBurst> failed;
  std::shared_ptr<StoreApi> api;
  SessionId session;
  {
    MutexLock lock(mu_);
    if (closing_) return;
    closing_ = true;
    failed = TakePending();
    while (jobs_ > 0) changed_.WaitFor(mu_, absl::Seconds(1));  // each ends by its own deadlines
    DropChannel();
    if (has_session_) api = api_;
    session = session_.session;
    has_session_ = false;
    ++incarnation_;
    state_ = State::kDown;
  }
  for (LinkBurst& burst : failed) burst.fail(PieceStatus::kNotAttempted);
  CloseDropped();
  // Best effort: without it the store lets go when the lease ends.
  if (api != nullptr) api->CloseSession(session).IgnoreError();
}

void StoreLink::ReportCorrupt(TicketRef ticket, std::vector<uint64_t> records) {
  const absl::StatusOr<LinkSession> session = CurrentSession();
  if (!session.ok()) return;
  (void)calls_.TryRun([session = *session, ticket, records = std::move(records)] {
    session.api->Verify(VerifyRequest{session.session, ticket, records}).IgnoreError();
  });
}

void StoreLink::LoseSession(absl::string_view why) {
  if (!has_session_) return;
  last_failure_ =
      absl::UnavailableError(absl::StrCat("store ", name_, ": the session was lost: ", why));
  KVT_LOG(kInfo, last_failure_.message(), "; ", live_.size(), " tickets had blocks there");
  has_session_ = false;
  ++incarnation_;
  live_.clear();
  DropChannel();
  // A connect job that is under way decides itself what comes next.
  if (state_ == State::kUp) GoDownFromUp(clock_.Now());
}

void StoreLink::CountFailure(const absl::Status& status) {
  ++failures_;
  ++failures_in_row_;
  last_failure_ = absl::Status(absl::StatusCode::kUnavailable,
                               absl::StrCat("store ", name_, ": ", status.message()));
  if (state_ != State::kUp || failures_in_row_ < config_.options.breaker_failures) return;
  ++breaker_opened_;
  if (!told_down_) {
    KVT_LOG(kWarning, "store ", name_, " does not answer: ", status.message(),
            "; its blocks count as absent until it does");
    told_down_ = true;
  }
  GoDown(clock_.Now() + TakePause());
}

bool StoreLink::IsSettled(absl::Time now) const {
  return now - up_since_ >= config_.options.breaker_pause_max;
}

absl::Duration StoreLink::TakePause() {
  const absl::Duration pause = pause_;
  pause_ = std::min(pause_ * 2, config_.options.breaker_pause_max);
  return pause;
}

void StoreLink::GoDownFromUp(absl::Time now) {
  GoDown(IsSettled(now) ? now : now + TakePause());
}

void StoreLink::GoDown(absl::Time connect_at) {
  state_ = State::kDown;
  connect_at_ = connect_at;
  changed_.NotifyAll();
}

void StoreLink::DropChannel() {
  if (channel_ != nullptr) dropped_.push_back(std::move(channel_));
  channel_ = nullptr;
}

std::vector<LinkBurst> StoreLink::TakePending() {
  std::vector<LinkBurst> taken(std::make_move_iterator(pending_.begin()),
                               std::make_move_iterator(pending_.end()));
  pending_.clear();
  return taken;
}

void StoreLink::CloseDropped() {
  std::vector<std::shared_ptr<Channel>> dropped;
  std::vector<LinkBurst> failed;
  PieceStatus why = PieceStatus::kNotAttempted;
  {
    MutexLock lock(mu_);
    dropped = std::move(dropped_);
    dropped_.clear();
    // What waited for a channel that is gone; its blocks count as lost.
    if (channel_ == nullptr) failed = TakePending();
    if (!failed.empty()) why = Verdict(failed.front().incarnation);
  }
  for (const auto& channel : dropped) channel->Close();
  for (LinkBurst& burst : failed) burst.fail(why);
}

}  // namespace kvt
