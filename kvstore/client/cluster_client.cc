#include "kvstore/client/cluster_client.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/base/random.h"
#include "kvstore/client/worker_daemon.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(2);
constexpr absl::Duration kPoll = absl::Milliseconds(5);

NodeName FreshName() {
  return absl::StrFormat("client-%d-%08x", getpid(),
                         static_cast<uint32_t>(Random::FromEntropy().Next()));
}

// The model as the cluster serves it, when only its name is given.
absl::Status CompleteModel(CoordinatorApi& coordinator, ModelInfo* model) {
  if (model->name.empty()) return absl::InvalidArgumentError("model.name: empty");
  if (!model->fingerprint.empty()) return model->geometry.Validate();
  KVT_ASSIGN_OR_RETURN(const std::vector<ModelInfo> served, coordinator.Models());
  for (const ModelInfo& candidate : served) {
    if (candidate.name != model->name) continue;
    *model = candidate;
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat(
      "model ", model->name, " is not served here; served: ",
      served.empty() ? "none"
                     : absl::StrJoin(served, ", ", [](std::string* out, const ModelInfo& m) {
                         absl::StrAppend(out, m.name);
                       })));
}

}  // namespace

class ClusterClient::Impl {
 public:
  Impl(ClusterClientOptions options, std::unique_ptr<WorkerDaemon> daemon)
      : options_(std::move(options)), daemon_(std::move(daemon)) {}

  absl::Status Join() {
    const absl::Time deadline = RealClock::Get().Now() + options_.connect_timeout;
    WorkerEvents events;
    events.load = [this] { return Load(); };
    events.cancelled = [this](const std::vector<TicketId>& ids) { Cancelled(ids); };
    events.drain = [] {};
    daemon_->Join("", std::move(events));
    KVT_RETURN_IF_ERROR(daemon_->WaitJoined(options_.connect_timeout));
    KVT_ASSIGN_OR_RETURN(const ClusterView view, daemon_->coordinator().View());
    if (view.stores.empty()) return absl::FailedPreconditionError("no store is ready");
    // The view comes with the first heartbeat.
    MutexLock lock(mu_);
    while (daemon_->tier().Figures().empty() && RealClock::Get().Now() < deadline) {
      changed_.WaitFor(mu_, kPoll);
    }
    return daemon_->tier().WaitConnected(
        std::max(deadline - RealClock::Get().Now(), absl::ZeroDuration()));
  }

  absl::StatusOr<HeldTicket> Admit(const AdmitOptions& options) {
    AdmitRequest request;
    request.model = options_.model.name;
    request.tenant = options.tenant;
    request.prompt_tokens = options.prompt_tokens;
    request.output_tokens_max = options.output_tokens_max;
    request.fidelity = options.fidelity;
    request.holder = options_.name;
    KVT_ASSIGN_OR_RETURN(const AdmitReply reply, daemon_->coordinator().Admit(request));
    KVT_ASSIGN_OR_RETURN(HeldTicket held, daemon_->gate().Check(reply.ticket, absl::Now()));
    MutexLock lock(mu_);
    live_[held.ticket.id] = Live{.ref = held.ref(), .cancelled = false};
    return held;
  }

  void Finish(const HeldTicket& ticket, const absl::Status& outcome) {
    {
      MutexLock lock(mu_);
      if (live_.erase(ticket.ticket.id) == 0) return;
    }
    daemon_->tier().Release(ticket.ref());
    TicketUpdate update;
    update.id = ticket.ticket.id;
    update.epoch = ticket.ticket.epoch;
    update.node = options_.name;
    update.phase = outcome.ok() ? RequestPhase::kDone : RequestPhase::kFailed;
    update.error = std::string(outcome.message());
    const absl::Status told = daemon_->coordinator().Update({update});
    if (!told.ok()) KVT_LOG(kInfo, "the end of a ticket was not reported: ", told.message());
  }

  bool IsCancelled(TicketId id) {
    MutexLock lock(mu_);
    const auto found = live_.find(id);
    return found != live_.end() && found->second.cancelled;
  }

  const ClusterClientOptions& options() const { return options_; }
  WorkerDaemon& daemon() { return *daemon_; }

 private:
  struct Live {
    TicketRef ref;
    bool cancelled = false;
  };

  LoadReport Load() {
    LoadReport load;
    MutexLock lock(mu_);
    for (const auto& [id, live] : live_) load.tickets.push_back(live.ref);
    load.running = static_cast<uint32_t>(live_.size());
    return load;
  }

  void Cancelled(const std::vector<TicketId>& ids) {
    MutexLock lock(mu_);
    for (const TicketId id : ids) {
      if (const auto found = live_.find(id); found != live_.end()) found->second.cancelled = true;
    }
  }

  const ClusterClientOptions options_;
  Mutex mu_;
  CondVar changed_;
  absl::flat_hash_map<TicketId, Live> live_ ABSL_GUARDED_BY(mu_);
  // Last: its threads use the rest.
  const std::unique_ptr<WorkerDaemon> daemon_;
};

absl::StatusOr<std::unique_ptr<ClusterClient>> ClusterClient::Connect(
    ClusterClientOptions options) {
  if (options.name.empty()) options.name = FreshName();
  if (options.connect_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("connect_timeout: not above zero");
  }
  KVT_RETURN_IF_ERROR(CompleteModel(*ConnectCoordinator(options.coordinator, kCallTimeout),
                                    &options.model));
  WorkerDaemonOptions worker;
  worker.kind = NodeKind::kClient;
  worker.node.name = options.name;
  worker.node.coordinator = options.coordinator;
  worker.tier = options.tier;
  worker.model = options.model;
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<WorkerDaemon> daemon,
                       WorkerDaemon::Create(std::move(worker)));
  auto impl = std::make_unique<Impl>(std::move(options), std::move(daemon));
  KVT_RETURN_IF_ERROR(impl->Join());
  return std::unique_ptr<ClusterClient>(new ClusterClient(std::move(impl)));
}

ClusterClient::ClusterClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ClusterClient::~ClusterClient() { Close(); }

absl::StatusOr<HeldTicket> ClusterClient::Admit(const AdmitOptions& options) {
  return impl_->Admit(options);
}
void ClusterClient::Finish(const HeldTicket& ticket, const absl::Status& outcome) {
  impl_->Finish(ticket, outcome);
}
bool ClusterClient::IsCancelled(TicketId id) const { return impl_->IsCancelled(id); }
TierClient& ClusterClient::tier() { return impl_->daemon().tier(); }
CoordinatorApi& ClusterClient::coordinator() { return impl_->daemon().coordinator(); }
const ModelInfo& ClusterClient::model() const { return impl_->options().model; }
const NodeName& ClusterClient::name() const { return impl_->options().name; }

KeyChain ClusterClient::Keys(const std::string& tenant, const std::string& salt) const {
  KeyDomain domain;
  domain.cluster_secret = impl_->daemon().cluster_secret();
  domain.model_fingerprint = model().fingerprint;
  domain.numerics_id = model().numerics_id;
  domain.geometry = model().geometry;
  domain.tenant = tenant;
  domain.salt = salt;
  return KeyChain(domain);
}

void ClusterClient::Close() { impl_->daemon().Stop(); }

}  // namespace kvt
