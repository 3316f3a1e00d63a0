// CoordinatorApi over the pure core: one mutex, a clock, keys and randomness. Owned by main (and by
// tests); thread-safe. Someone must call Tick() at least four times a second.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "coordinator/core/cluster.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

class CoordinatorService final : public CoordinatorApi {
 public:
  // `clock` is borrowed. `unix_start`: the calendar at `clock.Now()`; tickets carry calendar times.
  CoordinatorService(const CoordinatorCoreOptions& options, const Clock& clock,
                     absl::Time unix_start, std::unique_ptr<TicketSigner> signer);

  absl::StatusOr<RegisterReply> Register(const RegisterRequest& request) override;
  absl::StatusOr<HeartbeatReply> Heartbeat(const HeartbeatRequest& request) override;
  absl::Status Leave(const NodeName& name, BootEpoch epoch) override;
  absl::StatusOr<AdmitReply> Admit(const AdmitRequest& request) override;
  absl::StatusOr<PlaceReply> Place(const PlaceRequest& request) override;
  absl::StatusOr<RegrantReply> Regrant(const RegrantRequest& request) override;
  absl::Status Cancel(TicketId id, const std::string& capability) override;
  absl::Status Update(const std::vector<TicketUpdate>& updates) override;
  absl::StatusOr<ClusterView> View() override;
  absl::StatusOr<ClusterStatus> Status() override;
  absl::StatusOr<std::vector<RequestStatus>> Requests() override;
  absl::StatusOr<std::vector<ModelInfo>> Models() override;

  // Declares deaths and expiries; logs what is new.
  void Tick();
  // From now on Admit answers Unavailable; everything else goes on.
  void StopAdmitting();

 private:
  [[nodiscard]] Moment Now() const;

  const CoordinatorCoreOptions options_;
  const Clock& clock_;
  const absl::Time started_;
  const absl::Time unix_start_;
  const std::unique_ptr<TicketSigner> signer_;
  const std::unique_ptr<TicketVerifier> verifier_;
  const std::string epoch_;  // 16 hex digits

  mutable Mutex mu_;
  Cluster cluster_ ABSL_GUARDED_BY(mu_);
  bool admitting_ ABSL_GUARDED_BY(mu_) = true;
};

}  // namespace kvt
