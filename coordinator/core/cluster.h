// The coordinator's state machine: every call of CoordinatorApi as a function of state, request and
// time (DESIGN 7). Pure: signing, randomness and clocks stay outside. Not thread-safe; the service
// holds it under one mutex. Failure texts name the node, model or field.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/core/core_options.h"
#include "coordinator/core/event_log.h"
#include "coordinator/core/membership.h"
#include "coordinator/core/request_table.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt {

// Monotonic time for deadlines and the calendar for people and tickets.
struct Moment {
  absl::Time monotonic;
  absl::Time unix;
};

// A grant before it is signed.
struct Grant {
  Ticket ticket;
  std::string address;  // of the worker it sends to
};

class Cluster {
 public:
  explicit Cluster(const CoordinatorCoreOptions& options)
      : options_(options), nodes_(options), requests_(options) {}

  absl::Status Register(const Moment& now, const RegisterRequest& request);
  HeartbeatReply Heartbeat(const Moment& now, const HeartbeatRequest& request);
  absl::Status Leave(const Moment& now, const NodeName& name, BootEpoch epoch);
  absl::Status SetDraining(const Moment& now, const NodeName& name, bool draining);
  // `capability`: 16 fresh random bytes. A holder: its own ticket, no worker needed. Without a store
  // that is ready the ticket's placement is empty, and workers serve it without the tier; a holder,
  // which has nothing but the tier, is refused (FailedPrecondition).
  absl::StatusOr<Grant> Admit(const Moment& now, const AdmitRequest& request,
                              std::string capability);
  // `ticket`: verified by the caller. A ticket that another boot of the coordinator granted is
  // adopted. FailedPrecondition: fenced by a higher epoch, over, or no worker.
  absl::StatusOr<Grant> Place(const Moment& now, const Ticket& ticket,
                              const std::vector<NodeName>& refused_by);
  absl::StatusOr<Grant> Regrant(const Moment& now, const Ticket& ticket,
                                const std::string& reason);
  // OK for a request that is over. NotFound: unknown; PermissionDenied: wrong capability.
  absl::Status Cancel(const Moment& now, TicketId id, const std::string& capability);
  void Update(const Moment& now, const std::vector<TicketUpdate>& updates);
  // Call at least four times a second.
  void Tick(const Moment& now);

  [[nodiscard]] ClusterView View() const { return nodes_.View(); }
  // coordinator_epoch and uptime are the caller's to fill.
  [[nodiscard]] ClusterStatus Status(const Moment& now) const;
  [[nodiscard]] std::vector<RequestStatus> Requests(const Moment& now) const {
    return requests_.List(now.monotonic);
  }
  // Models with an alive worker, by name; the smallest context any of its workers has.
  [[nodiscard]] std::vector<ModelInfo> Models() const;
  [[nodiscard]] const Membership& nodes() const { return nodes_; }
  [[nodiscard]] const RequestCounts& counts() const { return requests_.counts(); }
  [[nodiscard]] std::vector<ClusterEvent> TakeNewEvents() { return events_.TakeNew(); }

 private:
  absl::StatusOr<ModelInfo> ModelOf(const AdmitRequest& request) const;
  // The fidelity it gets, too.
  absl::StatusOr<Fidelity> CheckAdmission(const AdmitRequest& request, ModelInfo* model) const;
  absl::StatusOr<RequestRecord*> FindOrAdopt(const Moment& now, const Ticket& ticket,
                                             RequestPhase phase);
  void Act(const Moment& now, const std::vector<Departure>& departures);
  // Tells when requests begin and cease to be served without stores.
  void NoteTier(const Moment& now, bool stores);

  const CoordinatorCoreOptions options_;
  Membership nodes_;
  RequestTable requests_;
  EventLog events_;
  bool has_tier_ = true;  // as of the last admission
  absl::Time last_tick_ = absl::InfiniteFuture();
};

}  // namespace kvt
