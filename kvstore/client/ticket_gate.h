// What a worker checks of every ticket before it takes a request: the coordinator's signature, that
// the ticket is for this worker and this model, and that it is presented in time (DESIGN 4, 7).
//
// Thread-safe. The key comes with the registration; until then every ticket is refused.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/ids.h"
#include "kernels/base/mutex.h"
#include "kvstore/client/tier_types.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

class TicketGate {
 public:
  // `kind` is kPrefill or kClient (the ticket's prefill_worker must be `node`) or kDecode (its
  // decode_worker).
  TicketGate(NodeKind kind, NodeName node, ModelInfo model);

  // The coordinator's public key, 32 raw bytes. InvalidArgument leaves the old one.
  absl::Status SetKey(absl::string_view raw32);

  // Unavailable: not registered yet. Unauthenticated, InvalidArgument: see TicketVerifier.
  // FailedPrecondition: for another worker, model, or numerics (both sides named).
  // DeadlineExceeded: first presented after its present_by.
  [[nodiscard]] absl::StatusOr<HeldTicket> Check(const SignedTicket& ticket,
                                                 absl::Time wall_now) const;
  // The signature alone.
  [[nodiscard]] absl::StatusOr<Ticket> Verify(const SignedTicket& ticket) const;

 private:
  const NodeKind kind_;
  const NodeName node_;
  const ModelInfo model_;
  mutable Mutex mu_;
  std::shared_ptr<const TicketVerifier> verifier_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvt
