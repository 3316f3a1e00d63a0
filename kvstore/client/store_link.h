// One store as a worker is connected to it: control stub, session with its lease, data channel,
// breaker. Knows nothing of blocks or placement.
//
//            connect job                 renewal, channel open, calls succeed
//   kDown ---------------> kConnecting ------------------------------> kUp
//     ^  breaker pause          |                                       |
//     +-------------------------+----- failures, session or lease lost -+
//
// The pause doubles with every failure and is short again only when the link has been up for
// breaker_pause_max: a store that comes and goes is asked ever more rarely.
//
// 1. An incarnation is one session. It changes when the session is lost (NotFound, the store's boot
//    epoch changed, the lease ran out), never when only the channel was reopened: pins survive that.
// 2. A ticket is in the live list before its first call is sent, and no renewal that does not list
//    it is then under way: the store can never let go of what was just pinned.
// 3. Only this class owns channels; they are closed on the call pool or in Close(), never on a
//    transport thread.
//
// Owned by TierClient. Thread-safe. The call pool outlives it and has run its jobs when it goes.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/client/rate_average.h"
#include "kvstore/client/tier_client.h"
#include "kvstore/client/tier_types.h"
#include "kvstore/transport/transport.h"

namespace kvt {

// Bursts of one store that are in flight at once, and that wait for their turn.
inline constexpr int kLinkBurstsMax = kChannelBurstsMax / 2;
inline constexpr int kLinkPendingMax = 4096;

// What control calls are made with; valid for one incarnation.
struct LinkSession {
  std::shared_ptr<StoreApi> api;
  SessionId session;
  uint64_t incarnation = 0;
  std::optional<TicketRef> ticket;  // BeginCall's
};

// A burst on its way into a channel. Exactly one of the two ends it: `submit` was called and returned
// OK (its completion then calls StoreLink::BurstEnded), or `fail` was called, with the verdict of
// every piece: kExpired (the session that pinned them has ended) or kNotAttempted.
struct LinkBurst {
  uint64_t incarnation = 0;
  absl::Time deadline;  // RealClock
  std::function<absl::Status(Channel&, uint64_t channel_serial)> submit;
  std::function<void(PieceStatus why)> fail;
};

class StoreLink {
 public:
  // Counters of the data path, added to by the transfer code.
  struct Counters {
    std::atomic<uint64_t> lookups{0}, lookup_blocks{0}, hit_blocks{0}, reserved_blocks{0},
        refused{0}, pulled_bytes{0}, pushed_bytes{0}, pull_bursts{0}, push_bursts{0},
        lost_pieces{0}, corrupt_pieces{0}, expired_pieces{0}, disk_bytes{0}, promote_calls{0};
  };

  // `config` and the others outlive the link.
  StoreLink(const TierClientConfig& config, StoreRef store, CallPool& calls, const Clock& clock);
  ~StoreLink();  // Close()

  [[nodiscard]] const NodeName& name() const { return name_; }
  // The store as the newest view names it. A new boot epoch ends the session, a new address the
  // stub too.
  void SetStore(const StoreRef& store);
  // False: the view does not name it. Its session ends when that has lasted for a lease (a restarted
  // coordinator learns of the stores one by one) and no ticket lives there.
  void SetWanted(bool wanted);
  [[nodiscard]] bool IsWanted() const;

  // Starts what is due; returns when to call again at the latest.
  absl::Time Tick(absl::Time now);
  // OK when up, else why not.
  [[nodiscard]] absl::Status UpStatus() const;
  [[nodiscard]] bool IsUp() const;

  // While the first attempt to connect is under way: until it has ended or `deadline` (RealClock). A
  // worker that has just learned of a store would count its blocks as absent, and place new ones
  // where nobody looks for them.
  void AwaitFirstAttempt(absl::Time deadline);

  // The session to call with, the ticket entered into the live list (rule 2). Unavailable when the
  // store is down; DeadlineExceeded when a renewal held it up until `deadline` (RealClock).
  absl::StatusOr<LinkSession> BeginCall(TicketRef ticket, absl::Time deadline);
  // The session as it is, for calls of tickets that live here. Unavailable.
  [[nodiscard]] absl::StatusOr<LinkSession> CurrentSession() const;
  // Every control call's outcome, for the breaker and for lost sessions. Where the ticket was let go
  // while BeginCall's call ran, which may have reached the store later, it is let go there again.
  void EndCall(const LinkSession& session, const absl::Status& status);
  // A call of that incarnation has not been answered for so long that its caller gave up: a failure
  // for the breaker, before the call ends by itself.
  void NoteUnanswered(uint64_t incarnation);
  // Takes the ticket off the live list; true when it was there.
  bool Forget(TicketRef ticket);

  // Has the store look at records whose bytes arrived corrupt, in the background.
  void ReportCorrupt(TicketRef ticket, std::vector<uint64_t> records);

  // Hands the burst to the channel, at once or when earlier ones have ended; `fail` is called
  // instead, perhaps before this returns, when there is no channel of that incarnation or the lease
  // is over.
  void Submit(LinkBurst burst);
  // To be called at the end of every accepted burst, on whatever thread: lets waiting ones go.
  void BurstEnded();
  void CancelBurst(uint64_t channel_serial, BurstId burst);

  // Bytes of a pull that arrived, and how long they took; `disk`: they were read from disk first.
  void NotePull(bool disk, uint64_t bytes, absl::Duration took, absl::Time now);
  [[nodiscard]] PullRates Rates() const;

  Counters& counters() { return counters_; }
  [[nodiscard]] StoreLinkFigures Figures() const;

  // Lets the session and the channel go; every accepted burst has ended when it returns.
  void Close();

 private:
  enum class State : uint8_t { kDown, kConnecting, kUp };
  struct Attach {
    std::unique_ptr<Channel> channel;
    std::string scheme;
  };

  // Jobs, on the call pool; at most one of a link at a time.
  void StartJob(void (StoreLink::*job)()) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ConnectJob();
  void RenewJob();
  void DisconnectJob();
  absl::Status Connect();
  absl::Status OpenSession(StoreApi& api);
  absl::Status Renew(StoreApi& api);
  absl::StatusOr<Attach> OpenChannel(const OpenSessionReply& reply);
  absl::StatusOr<Attach> Attempt(absl::string_view scheme, const std::string& address,
                                 const SessionToken& token);
  Transport* FindTransport(absl::string_view scheme) const;

  bool IsUpLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LoseSession(absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CountFailure(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void GoDown(absl::Time connect_at) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // After a loss that no failed call explains: at once when the link was well, else after the pause.
  void GoDownFromUp(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  [[nodiscard]] bool IsSettled(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Duration TakePause() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Why a burst of that incarnation may not start, or kOk.
  [[nodiscard]] PieceStatus Verdict(uint64_t incarnation) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Moves the channel to those that a job closes.
  void DropChannel() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Ends a use of a channel outside the lock: this may be a transport thread, which must not drop the
  // last reference, so that is left to a job.
  void GiveBack(std::shared_ptr<Channel> channel);
  std::vector<LinkBurst> TakePending() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CloseDropped();
  // Counts the call as ended; true when its ticket is off the live list and no other call of it runs.
  bool EndsForgotten(const TicketRef& ticket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const TierClientConfig& config_;
  const NodeName name_;
  CallPool& calls_;
  const Clock& clock_;
  Counters counters_;
  mutable Mutex rates_mu_;
  RateAverage memory_rate_ ABSL_GUARDED_BY(rates_mu_);
  RateAverage disk_rate_ ABSL_GUARDED_BY(rates_mu_);

  mutable Mutex mu_;
  CondVar changed_;
  StoreRef store_ ABSL_GUARDED_BY(mu_);
  bool wanted_ ABSL_GUARDED_BY(mu_) = true;
  absl::Time unwanted_since_ ABSL_GUARDED_BY(mu_);
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  State state_ ABSL_GUARDED_BY(mu_) = State::kDown;
  bool attempted_ ABSL_GUARDED_BY(mu_) = false;  // an attempt to connect has ended
  int jobs_ ABSL_GUARDED_BY(mu_) = 0;  // on the call pool, of this link
  std::shared_ptr<StoreApi> api_ ABSL_GUARDED_BY(mu_);
  bool has_session_ ABSL_GUARDED_BY(mu_) = false;
  OpenSessionReply session_ ABSL_GUARDED_BY(mu_);
  uint64_t incarnation_ ABSL_GUARDED_BY(mu_) = 1;
  absl::Time lease_end_ ABSL_GUARDED_BY(mu_);
  absl::Time renew_at_ ABSL_GUARDED_BY(mu_);
  bool renewing_ ABSL_GUARDED_BY(mu_) = false;
  bool told_down_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<Channel> channel_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<Channel>> dropped_ ABSL_GUARDED_BY(mu_);
  uint64_t channel_serial_ ABSL_GUARDED_BY(mu_) = 0;
  std::string scheme_ ABSL_GUARDED_BY(mu_);
  int in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<LinkBurst> pending_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<std::pair<uint64_t, uint32_t>> live_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::pair<uint64_t, uint32_t>, int> calling_ ABSL_GUARDED_BY(mu_);  // by ticket
  int failures_in_row_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Duration pause_ ABSL_GUARDED_BY(mu_);
  absl::Time up_since_ ABSL_GUARDED_BY(mu_);
  absl::Time connect_at_ ABSL_GUARDED_BY(mu_);
  absl::Status last_failure_ ABSL_GUARDED_BY(mu_);
  uint64_t sessions_opened_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t failures_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t breaker_opened_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvt
