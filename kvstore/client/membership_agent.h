// A node's membership in the cluster: registers with the coordinator, sends heartbeats, delivers
// what they bring, and fences the node when its lease could not be renewed (DESIGN 7). A coordinator
// that is away does not stop the data path: the agent keeps trying and only IsFenced() turns true.
//
// Owned by a composition root, which gives it a thread:
//   std::thread thread([&] { agent.Run(); });  ...  agent.Stop(); thread.join();
// Step, Run and the callbacks belong to that one thread; the const methods and Stop to any.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/clock.h"
#include "kernels/base/ids.h"
#include "kernels/base/mutex.h"
#include "kernels/base/random.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt {

struct MembershipOptions {
  RegisterRequest node;
  absl::Duration retry_min = absl::Milliseconds(100);  // doubled up to retry_max, with jitter
  absl::Duration retry_max = absl::Seconds(2);
};

// All optional but `load`. They run on the agent's thread and must not block it for long.
struct MembershipEvents {
  std::function<LoadReport()> load;
  // After every successful registration: the ticket key, heartbeat interval, coordinator epoch. A
  // changed coordinator epoch means that it restarted.
  std::function<void(const RegisterReply&)> on_registered;
  std::function<void(const ClusterView&)> on_view;
  std::function<void(const std::vector<TicketId>&)> on_cancelled;
  std::function<void(bool draining)> on_drain;    // when it changes
  std::function<void(bool fenced)> on_fenced;     // when it changes
};

class MembershipAgent {
 public:
  // `coordinator` (its calls end by a deadline) and `clock` outlive the agent.
  MembershipAgent(CoordinatorApi& coordinator, MembershipOptions options, MembershipEvents events,
                  const Clock& clock);
  // Stopped by then.
  ~MembershipAgent();

  // Does what is due (register, heartbeat) and returns when it wants to be called next. For tests
  // and for an owner with a loop of its own; else Run.
  absl::Time Step();
  // Steps until Stop(), then leaves the cluster.
  void Run();
  // Makes Run send what it has to say now instead of at the next heartbeat. Any thread.
  void SendNow();
  // Makes Run leave and return. Idempotent; any thread.
  void Stop();

  // Waits until registered once, or `timeout`: then the last failure. For main, while Run runs.
  absl::Status WaitRegistered(absl::Duration timeout);
  [[nodiscard]] bool IsRegistered() const;
  // True when the lease, counted from before the last successful call was sent, is over, or no
  // registration has succeeded yet: a worker then refuses new work. Right even while the agent's
  // thread is stuck in a call.
  [[nodiscard]] bool IsFenced() const;

 private:
  absl::Time Register(absl::Time now);
  absl::Time SendHeartbeat(absl::Time now);
  absl::Time RetryLater(absl::Time now, const absl::Status& why);
  void TellFenced();

  CoordinatorApi& coordinator_;
  const MembershipOptions options_;
  const MembershipEvents events_;
  const Clock& clock_;

  // Of the agent's thread.
  Random random_;
  absl::Time next_;
  absl::Duration retry_;
  absl::Duration interval_;
  absl::Duration lease_;
  std::string coordinator_epoch_;
  uint64_t view_version_ = 0;
  bool draining_ = false;
  bool told_fenced_ = true;
  bool told_failure_ = false;

  std::atomic<int64_t> lease_end_ns_{0};  // clock_'s time; 0: never registered
  std::atomic<bool> registered_{false};

  Mutex mu_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool asked_ ABSL_GUARDED_BY(mu_) = false;  // SendNow
  bool ever_registered_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status last_failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvt
