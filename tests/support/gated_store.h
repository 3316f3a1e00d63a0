// A StoreApi in front of a real one that a test can make fail or wait: what a store that is dead,
// stopped or slow looks like from outside. Thread-safe.
#pragma once

#include <atomic>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kvstore/wire/store_api.h"

namespace kvt {

class GatedStore final : public StoreApi {
 public:
  // `target` may be null (nobody there) and may change when the store restarts.
  explicit GatedStore(StoreApi* target) : target_(target) {}

  void SetTarget(StoreApi* target);
  // Returns when no call is inside a target any more: before a target goes.
  void Drain();
  // While not OK every call fails with it, without reaching the store.
  void SetFailure(absl::Status failure);
  // Every call first waits, at most for so long or until it is set to zero.
  void SetDelay(absl::Duration delay);
  // While true a Reserve waits on its way in, at most 20 s; other calls pass it.
  void HoldReserve(bool hold);
  // Promote calls go to it instead of the store; they fail and wait as the others do.
  void SetPromote(std::function<PromoteReply(const PromoteRequest&)> promote);
  [[nodiscard]] int reserves_held() const { return reserves_held_.load(); }
  [[nodiscard]] int calls() const { return calls_.load(); }

  absl::StatusOr<OpenSessionReply> OpenSession(const OpenSessionRequest& request) override;
  absl::StatusOr<RenewReply> Renew(const RenewRequest& request) override;
  absl::StatusOr<LookupReply> Lookup(const LookupRequest& request) override;
  absl::StatusOr<ReserveReply> Reserve(const ReserveRequest& request) override;
  absl::StatusOr<SealReply> Seal(const SealRequest& request) override;
  absl::Status Verify(const VerifyRequest& request) override;
  absl::StatusOr<PromoteReply> Promote(const PromoteRequest& request) override;
  absl::StatusOr<PurgeTenantReply> PurgeTenant(const PurgeTenantRequest& request) override;
  absl::Status Release(const ReleaseRequest& request) override;
  absl::Status CloseSession(SessionId session) override;
  absl::StatusOr<StoreStats> Stats() override;

 private:
  // Counts a call in for its life; `target` or `status` says how it goes on.
  class Passage {
   public:
    explicit Passage(GatedStore& gate);
    ~Passage();
    StoreApi* target = nullptr;
    absl::Status status;

   private:
    GatedStore& gate_;
  };

  std::atomic<int> calls_{0};
  std::atomic<int> reserves_held_{0};
  Mutex mu_;
  CondVar changed_;
  StoreApi* target_ ABSL_GUARDED_BY(mu_);
  bool hold_reserve_ ABSL_GUARDED_BY(mu_) = false;
  int inside_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::function<PromoteReply(const PromoteRequest&)> promote_ ABSL_GUARDED_BY(mu_);
  absl::Duration delay_ ABSL_GUARDED_BY(mu_) = absl::ZeroDuration();
};

}  // namespace kvt
