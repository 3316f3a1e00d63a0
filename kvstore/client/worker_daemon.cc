#include "kvstore/client/worker_daemon.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kvstore/client/listen_check.h"
#include "kvstore/client/tier_client_metrics.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_transport.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

constexpr absl::Duration kCoordinatorTimeout = absl::Seconds(2);
// Bounds of the pause between two ticks of the tier client.
constexpr absl::Duration kTickMin = absl::Milliseconds(200);
constexpr absl::Duration kTickMax = absl::Seconds(1);
// Blocking calls of the engine that run at once: lookups, seals, hand-overs.
constexpr int kControlThreads = 4;

UcxOptions UcxOf(const ClientOptions& tier) {
  UcxOptions ucx;
  ucx.tls = tier.ucx_tls;
  ucx.net_devices = tier.ucx_net_devices;
  return ucx;
}

}  // namespace

absl::Status WorkerDaemon::CheckHost(const WorkerDaemonOptions& options) {
  KVT_RETURN_IF_ERROR(CheckCanListen(options.node.listen));
  if (!options.node.metrics_listen.empty()) {
    KVT_RETURN_IF_ERROR(CheckCanListen(options.node.metrics_listen));
  }
  if (options.tier.transport == TierTransport::kShm) return absl::OkStatus();
  return MakeUcxTransport(UcxOf(options.tier)).status();
}

absl::StatusOr<std::unique_ptr<WorkerDaemon>> WorkerDaemon::Create(WorkerDaemonOptions options) {
  std::unique_ptr<WorkerDaemon> daemon(new WorkerDaemon(std::move(options)));
  KVT_RETURN_IF_ERROR(daemon->Build());
  return daemon;
}

WorkerDaemon::WorkerDaemon(WorkerDaemonOptions options)
    : options_(std::move(options)),
      epoch_(static_cast<uint64_t>(absl::ToUnixMicros(absl::Now()))),
      gate_(options_.kind, options_.node.name, options_.model) {}

absl::Status WorkerDaemon::Build() {
  if (!options_.node.metrics_listen.empty()) {
    KVT_ASSIGN_OR_RETURN(const HostPort at, ParseHostPort(options_.node.metrics_listen));
    KVT_ASSIGN_OR_RETURN(const int port, metrics_.Serve(at.host, at.port));
    KVT_LOG(kInfo, "metrics on ", at.host, ":", port);
  }
  KVT_ASSIGN_OR_RETURN(cluster_secret_, ReadClusterSecret(options_.tier.cluster_secret_file));
  coordinator_ = ConnectCoordinator(options_.node.coordinator, kCoordinatorTimeout);
  if (options_.tier.transport != TierTransport::kUcx) {
    ShmOptions shm;
    shm.gather_threads = options_.tier.shm_gather_threads;
    transports_.push_back(MakeShmTransport(shm));
  }
  if (options_.tier.transport != TierTransport::kShm) {
    KVT_ASSIGN_OR_RETURN(auto transport, MakeUcxTransport(UcxOf(options_.tier)));
    transports_.push_back(std::move(transport));
  }
  tier_calls_ = std::make_unique<CallPool>(options_.tier.control_threads);
  control_ = std::make_unique<CallPool>(kControlThreads);
  report_calls_ = std::make_unique<CallPool>(1);
  TierClientConfig config;
  config.worker = options_.node.name;
  config.worker_epoch = epoch_;
  config.model = options_.model;
  config.options = options_.tier;
  for (const auto& transport : transports_) config.transports.push_back(transport.get());
  tier_ = std::make_unique<TierClient>(config, *tier_calls_, RealClock::Get());
  if (options_.digest_geometry.has_value()) {
    // A store keeps one session for each worker's name.
    config.worker = absl::StrCat(options_.node.name, "/digest");
    config.model.geometry = *options_.digest_geometry;
    digest_tier_ = std::make_unique<TierClient>(std::move(config), *tier_calls_, RealClock::Get());
  }
  reporter_ = std::make_unique<TicketReporter>(*coordinator_, *report_calls_);
  return absl::OkStatus();
}

WorkerDaemon::~WorkerDaemon() { Stop(); }

void WorkerDaemon::Join(const std::string& control_address, WorkerEvents events) {
  MembershipOptions membership;
  RegisterRequest& node = membership.node;
  node.kind = options_.kind;
  node.name = options_.node.name;
  node.epoch = epoch_;
  node.control_address = control_address;
  node.pid = getpid();
  node.model = options_.model;
  node.capacity_bytes = options_.capacity_bytes;
  node.batch_max = options_.batch_max;
  MembershipEvents told;
  told.load = [this, load = std::move(events.load)] {
    LoadReport report = load();
    report.draining = draining_.load();
    return report;
  };
  told.on_registered = [this](const RegisterReply& reply) {
    const absl::Status status = gate_.SetKey(reply.ticket_public_key);
    if (!status.ok()) KVT_LOG(kError, "the coordinator's ticket key: ", status.ToString());
  };
  told.on_view = [this](const ClusterView& view) {
    tier_->SetView(view);
    if (digest_tier_ != nullptr) digest_tier_->SetView(view);
  };
  told.on_cancelled = std::move(events.cancelled);
  told.on_drain = [drain = std::move(events.drain)](bool draining) {
    if (draining) drain();
  };
  agent_ = std::make_unique<MembershipAgent>(*coordinator_, std::move(membership), std::move(told),
                                             RealClock::Get());
  agent_thread_ = std::thread([this] { agent_->Run(); });
  tick_thread_ = std::thread([this] { TickLoop(); });
}

void WorkerDaemon::AnnounceDrain() {
  draining_.store(true);
  if (agent_ != nullptr) agent_->SendNow();
}

absl::Status WorkerDaemon::WaitJoined(absl::Duration timeout) {
  KVT_CHECK(agent_ != nullptr);
  return agent_->WaitRegistered(timeout);
}

void WorkerDaemon::TickLoop() {
  TierClientMetrics tier_metrics(metrics_);
  while (true) {
    tier_metrics.Update(tier_->Figures());
    const absl::Time now = RealClock::Get().Now();
    absl::Time next = tier_->Tick(now);
    if (digest_tier_ != nullptr) next = std::min(next, digest_tier_->Tick(now));
    const absl::Duration pause = std::clamp(next - RealClock::Get().Now(), kTickMin, kTickMax);
    MutexLock lock(mu_);
    if (!stopping_) wake_.WaitFor(mu_, pause);
    if (stopping_) return;
  }
}

void WorkerDaemon::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  if (control_ != nullptr) control_->Stop();
  if (report_calls_ != nullptr) report_calls_->Stop();
  if (agent_ != nullptr) agent_->Stop();
  if (agent_thread_.joinable()) agent_thread_.join();
  if (tick_thread_.joinable()) tick_thread_.join();
  if (tier_ != nullptr) tier_->Close();
  if (digest_tier_ != nullptr) digest_tier_->Close();
  if (tier_calls_ != nullptr) tier_calls_->Stop();
}

}  // namespace kvt
