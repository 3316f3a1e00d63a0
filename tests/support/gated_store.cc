#include "tests/support/gated_store.h"

#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"

namespace kvt {

void GatedStore::SetTarget(StoreApi* target) {
  MutexLock lock(mu_);
  target_ = target;
}

void GatedStore::SetFailure(absl::Status failure) {
  MutexLock lock(mu_);
  failure_ = std::move(failure);
}

void GatedStore::SetDelay(absl::Duration delay) {
  MutexLock lock(mu_);
  delay_ = delay;
  changed_.NotifyAll();
}

void GatedStore::SetPromote(std::function<PromoteReply(const PromoteRequest&)> promote) {
  MutexLock lock(mu_);
  promote_ = std::move(promote);
}

void GatedStore::HoldReserve(bool hold) {
  MutexLock lock(mu_);
  hold_reserve_ = hold;
  changed_.NotifyAll();
}

void GatedStore::Drain() {
  MutexLock lock(mu_);
  while (inside_ > 0) changed_.WaitFor(mu_, absl::Seconds(1));
}

GatedStore::Passage::Passage(GatedStore& gate) : gate_(gate) {
  ++gate.calls_;
  MutexLock lock(gate.mu_);
  const absl::Time start = RealClock::Get().Now();
  while (true) {
    const absl::Duration left = start + gate.delay_ - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) break;
    gate.changed_.WaitFor(gate.mu_, left);
  }
  status = gate.failure_;
  if (status.ok() && gate.target_ == nullptr) status = absl::UnavailableError("nobody there");
  if (!status.ok()) return;
  target = gate.target_;
  ++gate.inside_;
}

GatedStore::Passage::~Passage() {
  if (target == nullptr) return;
  MutexLock lock(gate_.mu_);
  --gate_.inside_;
  gate_.changed_.NotifyAll();
}

absl::StatusOr<OpenSessionReply> GatedStore::OpenSession(const OpenSessionRequest& request) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->OpenSession(request);
}
absl::StatusOr<RenewReply> GatedStore::Renew(const RenewRequest& request) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->Renew(request);
}
absl::StatusOr<LookupReply> GatedStore::Lookup(const LookupRequest& request) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->Lookup(request);
}
absl::StatusOr<ReserveReply> GatedStore::Reserve(const ReserveRequest& request) {
  {
    MutexLock lock(mu_);
    const absl::Time start = RealClock::Get().Now();
    ++reserves_held_;
    while (hold_reserve_ && RealClock::Get().Now() < start + absl::Seconds(20)) {
      changed_.WaitFor(mu_, absl::Seconds(1));
    }
    --reserves_held_;
  }
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->Reserve(request);
}
absl::StatusOr<SealReply> GatedStore::Seal(const SealRequest& request) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->Seal(request);
}
absl::Status GatedStore::Verify(const VerifyRequest& request) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->Verify(request);
}
absl::StatusOr<PromoteReply> GatedStore::Promote(const PromoteRequest& request) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  std::function<PromoteReply(const PromoteRequest&)> promote;
  {
    MutexLock lock(mu_);
    promote = promote_;
  }
  if (promote) return promote(request);
  return passage.target->Promote(request);
}
absl::StatusOr<PurgeTenantReply> GatedStore::PurgeTenant(const PurgeTenantRequest& request) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->PurgeTenant(request);
}
absl::Status GatedStore::Release(const ReleaseRequest& request) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->Release(request);
}
absl::Status GatedStore::CloseSession(SessionId session) {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->CloseSession(session);
}
absl::StatusOr<StoreStats> GatedStore::Stats() {
  Passage passage(*this);
  if (passage.target == nullptr) return passage.status;
  return passage.target->Stats();
}

}  // namespace kvt
