#include "coordinator/coordinator_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/random.h"

namespace kvt {
namespace {

std::unique_ptr<TicketVerifier> VerifierOf(const TicketSigner& signer) {
  auto verifier = TicketVerifier::FromPublicKey(signer.PublicKey());
  KVT_CHECK(verifier.ok());
  return *std::move(verifier);
}

// From the kernel's entropy: a capability must not be guessed.
std::string FreshCapability() {
  std::string bytes;
  for (int i = 0; i < 2; ++i) {
    Random random = Random::FromEntropy();
    const uint64_t value = random.Next();
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  return bytes;
}

std::string FreshEpoch() { return absl::StrFormat("%016x", Random::FromEntropy().Next()); }

}  // namespace

CoordinatorService::CoordinatorService(const CoordinatorCoreOptions& options, const Clock& clock,
                                       absl::Time unix_start, std::unique_ptr<TicketSigner> signer)
    : options_(options),
      clock_(clock),
      started_(clock.Now()),
      unix_start_(unix_start),
      signer_(std::move(signer)),
      verifier_(VerifierOf(*signer_)),
      epoch_(FreshEpoch()),
      cluster_(options) {}

Moment CoordinatorService::Now() const {
  const absl::Time now = clock_.Now();
  return Moment{.monotonic = now, .unix = unix_start_ + (now - started_)};
}

absl::StatusOr<RegisterReply> CoordinatorService::Register(const RegisterRequest& request) {
  {
    MutexLock lock(mu_);
    KVT_RETURN_IF_ERROR(cluster_.Register(Now(), request));
  }
  return RegisterReply{.heartbeat_interval = options_.heartbeat_interval,
                       .lease = options_.lease,
                       .ticket_public_key = signer_->PublicKey(),
                       .coordinator_epoch = epoch_};
}

absl::StatusOr<HeartbeatReply> CoordinatorService::Heartbeat(const HeartbeatRequest& request) {
  MutexLock lock(mu_);
  return cluster_.Heartbeat(Now(), request);
}

absl::Status CoordinatorService::Leave(const NodeName& name, BootEpoch epoch) {
  MutexLock lock(mu_);
  return cluster_.Leave(Now(), name, epoch);
}

absl::StatusOr<AdmitReply> CoordinatorService::Admit(const AdmitRequest& request) {
  absl::StatusOr<Grant> grant;
  {
    MutexLock lock(mu_);
    if (!admitting_) return absl::UnavailableError("the coordinator is stopping");
    grant = cluster_.Admit(Now(), request, FreshCapability());
  }
  if (!grant.ok()) return grant.status();
  return AdmitReply{.ticket = signer_->Sign(grant->ticket),
                    .id = grant->ticket.id,
                    .prefill_address = grant->address};
}

absl::StatusOr<PlaceReply> CoordinatorService::Place(const PlaceRequest& request) {
  KVT_ASSIGN_OR_RETURN(const Ticket ticket, verifier_->Verify(request.ticket));
  absl::StatusOr<Grant> grant;
  {
    MutexLock lock(mu_);
    grant = cluster_.Place(Now(), ticket, request.refused_by);
  }
  if (!grant.ok()) return grant.status();
  return PlaceReply{.ticket = signer_->Sign(grant->ticket), .decode_address = grant->address};
}

absl::StatusOr<RegrantReply> CoordinatorService::Regrant(const RegrantRequest& request) {
  KVT_ASSIGN_OR_RETURN(const Ticket ticket, verifier_->Verify(request.ticket));
  absl::StatusOr<Grant> grant;
  {
    MutexLock lock(mu_);
    grant = cluster_.Regrant(Now(), ticket, request.reason);
  }
  if (!grant.ok()) return grant.status();
  return RegrantReply{.ticket = signer_->Sign(grant->ticket), .prefill_address = grant->address};
}

absl::Status CoordinatorService::Cancel(TicketId id, const std::string& capability) {
  MutexLock lock(mu_);
  return cluster_.Cancel(Now(), id, capability);
}

absl::Status CoordinatorService::Update(const std::vector<TicketUpdate>& updates) {
  MutexLock lock(mu_);
  cluster_.Update(Now(), updates);
  return absl::OkStatus();
}

absl::StatusOr<ClusterView> CoordinatorService::View() {
  MutexLock lock(mu_);
  return cluster_.View();
}

absl::StatusOr<ClusterStatus> CoordinatorService::Status() {
  MutexLock lock(mu_);
  const Moment now = Now();
  ClusterStatus status = cluster_.Status(now);
  status.coordinator_epoch = epoch_;
  status.uptime = now.monotonic - started_;
  return status;
}

absl::StatusOr<std::vector<RequestStatus>> CoordinatorService::Requests() {
  MutexLock lock(mu_);
  return cluster_.Requests(Now());
}

absl::StatusOr<std::vector<ModelInfo>> CoordinatorService::Models() {
  MutexLock lock(mu_);
  return cluster_.Models();
}

void CoordinatorService::Tick() {
  std::vector<ClusterEvent> events;
  {
    MutexLock lock(mu_);
    cluster_.Tick(Now());
    events = cluster_.TakeNewEvents();
  }
  for (const ClusterEvent& event : events) KVT_LOG(kInfo, event.text);
}

void CoordinatorService::StopAdmitting() {
  MutexLock lock(mu_);
  admitting_ = false;
}

}  // namespace kvt
