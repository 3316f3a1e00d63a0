#include "kvstore/client/membership_agent.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace kvt {
namespace {

// Bounds on what a coordinator may ask for.
constexpr absl::Duration kIntervalMin = absl::Milliseconds(10);
constexpr absl::Duration kIntervalMax = absl::Seconds(30);
// How long after the lease's end Step wants to be called to tell of it: clocks are read to microseconds.
constexpr absl::Duration kFenceSlack = absl::Milliseconds(1);

}  // namespace

MembershipAgent::MembershipAgent(CoordinatorApi& coordinator, MembershipOptions options,
                                 MembershipEvents events, const Clock& clock)
    : coordinator_(coordinator),
      options_(std::move(options)),
      events_(std::move(events)),
      clock_(clock),
      random_(options_.node.epoch.value()),
      next_(clock.Now()),
      retry_(options_.retry_min),
      last_failure_(absl::UnavailableError("not registered with the coordinator yet")) {
  KVT_CHECK(events_.load, "a node reports its load");
  KVT_CHECK(options_.retry_min > absl::ZeroDuration() && options_.retry_max >= options_.retry_min);
}

MembershipAgent::~MembershipAgent() { Stop(); }

absl::Time MembershipAgent::Step() {
  const absl::Time now = clock_.Now();
  if (now >= next_) {
    next_ = registered_.load() ? SendHeartbeat(now) : Register(now);
  }
  TellFenced();
  if (told_fenced_) return next_;
  return std::min(next_, absl::FromUnixNanos(lease_end_ns_.load()) + kFenceSlack);
}

absl::Time MembershipAgent::Register(absl::Time now) {
  absl::StatusOr<RegisterReply> reply = coordinator_.Register(options_.node);
  if (!reply.ok()) return RetryLater(clock_.Now(), reply.status());
  interval_ = std::clamp(reply->heartbeat_interval, kIntervalMin, kIntervalMax);
  lease_ = reply->lease;
  view_version_ = 0;
  retry_ = options_.retry_min;
  // Counted from before the request was sent: the coordinator's own count starts later.
  lease_end_ns_.store(absl::ToUnixNanos(now + lease_));
  registered_.store(true);
  if (told_failure_ || (!coordinator_epoch_.empty() && coordinator_epoch_ != reply->coordinator_epoch)) {
    KVT_LOG(kInfo, options_.node.name, " is registered with coordinator epoch ",
            reply->coordinator_epoch);
  }
  told_failure_ = false;
  coordinator_epoch_ = reply->coordinator_epoch;
  if (events_.on_registered) events_.on_registered(*reply);
  {
    MutexLock lock(mu_);
    ever_registered_ = true;
  }
  wake_.NotifyAll();
  return now;  // the first heartbeat fetches the view at once
}

absl::Time MembershipAgent::SendHeartbeat(absl::Time now) {
  HeartbeatRequest request;
  request.name = options_.node.name;
  request.epoch = options_.node.epoch;
  request.view_version = view_version_;
  request.load = events_.load();
  absl::StatusOr<HeartbeatReply> reply = coordinator_.Heartbeat(request);
  const bool unknown = (reply.ok() && reply->unknown) || absl::IsNotFound(reply.status());
  if (unknown) {
    registered_.store(false);
    return now;  // register again, at once
  }
  if (!reply.ok()) return RetryLater(clock_.Now(), reply.status());
  retry_ = options_.retry_min;
  if (told_failure_) KVT_LOG(kInfo, options_.node.name, " reaches the coordinator again");
  told_failure_ = false;
  lease_end_ns_.store(absl::ToUnixNanos(now + lease_));
  if (reply->view.version > view_version_) {
    view_version_ = reply->view.version;
    if (events_.on_view) events_.on_view(reply->view);
  }
  if (!reply->cancelled.empty() && events_.on_cancelled) events_.on_cancelled(reply->cancelled);
  if (reply->drain != draining_) {
    draining_ = reply->drain;
    if (events_.on_drain) events_.on_drain(draining_);
  }
  return NextOnGrid(now, interval_);
}

absl::Time MembershipAgent::RetryLater(absl::Time now, const absl::Status& why) {
  if (!told_failure_) {
    KVT_LOG(kWarning, options_.node.name, " cannot reach the coordinator: ", why.message(),
            "; trying again, the data path goes on");
    told_failure_ = true;
  }
  {
    MutexLock lock(mu_);
    last_failure_ = why;
  }
  // Half fixed, half random: nodes of a cluster do not come back in step.
  const absl::Duration pause = retry_ / 2 + retry_ / 2 * random_.Uniform();
  retry_ = std::min(retry_ * 2, options_.retry_max);
  return now + pause;
}

void MembershipAgent::TellFenced() {
  const bool fenced = IsFenced();
  if (fenced == told_fenced_) return;
  told_fenced_ = fenced;
  if (fenced) {
    KVT_LOG(kWarning, options_.node.name,
            " could not renew its lease with the coordinator: it takes no new work until it can");
  }
  if (events_.on_fenced) events_.on_fenced(fenced);
}

void MembershipAgent::Run() {
  while (true) {
    const absl::Time next = Step();
    MutexLock lock(mu_);
    if (stopping_) break;
    const absl::Duration wait = next - clock_.Now();
    if (wait > absl::ZeroDuration() && !asked_) wake_.WaitFor(mu_, wait);
    if (stopping_) break;
    // A coordinator that cannot be reached keeps its pace.
    if (asked_ && registered_.load() && !told_failure_) next_ = clock_.Now();
    asked_ = false;
  }
  if (!registered_.exchange(false)) return;
  const absl::Status left = coordinator_.Leave(options_.node.name, options_.node.epoch);
  if (!left.ok()) KVT_LOG(kInfo, "leaving the cluster: ", left.message());
}

void MembershipAgent::SendNow() {
  {
    MutexLock lock(mu_);
    asked_ = true;
  }
  wake_.NotifyAll();
}

void MembershipAgent::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.NotifyAll();
}

absl::Status MembershipAgent::WaitRegistered(absl::Duration timeout) {
  const absl::Time deadline = RealClock::Get().Now() + timeout;
  MutexLock lock(mu_);
  while (!ever_registered_ && !stopping_) {
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) return last_failure_;
    wake_.WaitFor(mu_, left);
  }
  return ever_registered_ ? absl::OkStatus() : absl::CancelledError("stopped");
}

bool MembershipAgent::IsRegistered() const { return registered_.load(); }

bool MembershipAgent::IsFenced() const {
  return absl::ToUnixNanos(clock_.Now()) >= lease_end_ns_.load();
}

}  // namespace kvt
