// What every worker process is made of besides its engine: the coordinator's stub, the tier client
// with its transports, membership, reports, metrics, and the threads of these. A daemon's main
// builds it, gives its parts to an engine, serves its API, and then calls Join.
//
// Owned by main; used from main's thread. The parts are thread-safe as their headers say.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/metrics.h"
#include "kernels/base/mutex.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/client/client_options.h"
#include "kvstore/client/membership_agent.h"
#include "kvstore/client/node_options.h"
#include "kvstore/client/ticket_gate.h"
#include "kvstore/client/ticket_reporter.h"
#include "kvstore/client/tier_client.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt {

struct WorkerDaemonOptions {
  NodeKind kind = NodeKind::kPrefill;
  NodeOptions node;
  ClientOptions tier;
  ModelInfo model;
  // Of the digests' blocks (kvstore/client/digest_blocks.h); none: the worker has no calibration.
  std::optional<Geometry> digest_geometry;
  uint64_t capacity_bytes = 0;
  uint32_t batch_max = 0;
};

// Called on the membership thread; must not block for long.
struct WorkerEvents {
  std::function<LoadReport()> load;
  std::function<void(const std::vector<TicketId>&)> cancelled;
  std::function<void()> drain;
};

class WorkerDaemon {
 public:
  // Before the model is loaded, which may take minutes: what of this host would make Create or the
  // control service fail (addresses, UCX devices and transports). Makes nothing that stays.
  static absl::Status CheckHost(const WorkerDaemonOptions& options);
  static absl::StatusOr<std::unique_ptr<WorkerDaemon>> Create(WorkerDaemonOptions options);
  ~WorkerDaemon();  // Stop()

  // Joins the cluster as a node whose control service is at `control_address`, and keeps trying.
  void Join(const std::string& control_address, WorkerEvents events);
  // Tells the coordinator, at once, that this worker takes nothing new: on the way to Stop.
  void AnnounceDrain();
  // Waits until the first registration; the last failure otherwise.
  absl::Status WaitJoined(absl::Duration timeout);
  // Leaves the cluster; nothing of it runs afterwards. The engine has stopped by then. Idempotent.
  void Stop();

  [[nodiscard]] CoordinatorApi& coordinator() { return *coordinator_; }
  [[nodiscard]] TierClient& tier() { return *tier_; }
  // Where the digests lie: the same stores through sessions of their own, under the worker's name
  // with "/digest". Null without digest_geometry. A ticket is released in it, too.
  [[nodiscard]] TierClient* digest_tier() { return digest_tier_.get(); }
  // For an engine's blocking calls; not the pool that the tier client uses.
  [[nodiscard]] CallPool& control() { return *control_; }
  [[nodiscard]] TicketReporter& reporter() { return *reporter_; }
  [[nodiscard]] TicketGate& gate() { return gate_; }
  [[nodiscard]] MetricsRegistry& metrics() { return metrics_; }
  [[nodiscard]] const std::string& cluster_secret() const { return cluster_secret_; }
  // A worker that lost its lease takes no new work.
  [[nodiscard]] bool IsFenced() const { return agent_ == nullptr || agent_->IsFenced(); }

 private:
  explicit WorkerDaemon(WorkerDaemonOptions options);
  absl::Status Build();
  void TickLoop();

  const WorkerDaemonOptions options_;
  const BootEpoch epoch_;
  std::string cluster_secret_;
  MetricsRegistry metrics_;
  TicketGate gate_;
  std::unique_ptr<CoordinatorApi> coordinator_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::unique_ptr<CallPool> tier_calls_;
  std::unique_ptr<CallPool> control_;
  std::unique_ptr<CallPool> report_calls_;
  std::unique_ptr<TierClient> tier_;
  std::unique_ptr<TierClient> digest_tier_;
  std::unique_ptr<TicketReporter> reporter_;
  std::unique_ptr<MembershipAgent> agent_;
  std::atomic<bool> draining_{false};
  std::thread agent_thread_;
  std::thread tick_thread_;
  Mutex mu_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvt
