// A program's way into a running kvtide cluster: the one header that users of the client library start
// from (docs/CLIENT.md, docs/examples/tier_client). It joins the cluster as a *client*: a member that
// serves nobody, holds tickets that name it, and reads and writes the tier through TierClient.
//
//   Connect -> Admit -> tier().Lookup / Reserve / Push / Seal / Pull -> Finish -> Close
//
// It owns everything it needs: the coordinator's stub, the transports, the tier client, and four to
// ten threads (membership, ticks, control calls, transports), all joined by Close. Thread-safe but for
// Close and destruction, which come last.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/ids.h"
#include "kvstore/client/client_options.h"
#include "kvstore/client/tier_client.h"
#include "kvstore/client/tier_types.h"
#include "kvstore/index/block_key.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt {

struct ClusterClientOptions {
  std::string coordinator = "127.0.0.1:7070";
  // Unique in the cluster; empty: "client-<pid>-<random>". Up to 64 letters, digits, '-', '_', '.'.
  NodeName name;
  // What the blocks are of. Its name alone: a model that the cluster serves, which the coordinator
  // describes; this client then shares blocks with its workers and must write what they would. All of
  // it: a model of the caller's own, which nobody else reads unless fingerprint, numerics id and
  // geometry are theirs too.
  ModelInfo model;
  // tier.cluster_secret_file is required: `kvtide up` makes it in its run directory.
  ClientOptions tier;
  // For Connect: joining, and a session and channel with every store.
  absl::Duration connect_timeout = absl::Seconds(10);
};

struct AdmitOptions {
  std::string tenant = {};         // sharing domain; empty: shared
  uint32_t prompt_tokens = 0;      // of the sequence; at least 1
  uint32_t output_tokens_max = 1;  // at least 1; what Reserve may keep room for
  Fidelity fidelity = Fidelity::kExact;
};

class ClusterClient {
 public:
  // InvalidArgument: options. NotFound, PermissionDenied: the secret's file. NotFound: the cluster
  // serves no such model (those it does are listed). Unavailable: no coordinator there, or a store
  // cannot be reached (named). FailedPrecondition: no store is ready, or the coordinator refused the
  // model or the wire versions (both sides named).
  static absl::StatusOr<std::unique_ptr<ClusterClient>> Connect(ClusterClientOptions options);
  ~ClusterClient();  // Close()
  ClusterClient(const ClusterClient&) = delete;
  ClusterClient& operator=(const ClusterClient&) = delete;

  // A signed ticket for one sequence, held by this client until Finish: renewed by its heartbeats,
  // shown by `kvtide requests`. ResourceExhausted: too many requests, try again. Unavailable: the
  // coordinator is away. Blocks up to 2 s.
  absl::StatusOr<HeldTicket> Admit(const AdmitOptions& options);
  // Lets go of all that the ticket holds in the stores (in the background) and tells the coordinator
  // how it ended: OK is "done", anything else "failed" with its message. Blocks up to 2 s. Transfers
  // of it have ended. Idempotent.
  void Finish(const HeldTicket& ticket, const absl::Status& outcome = absl::OkStatus());
  // The coordinator ended the ticket (a cancel, a purge, a lapse): what it holds is going; Finish it.
  [[nodiscard]] bool IsCancelled(TicketId id) const;

  [[nodiscard]] TierClient& tier();
  [[nodiscard]] CoordinatorApi& coordinator();
  [[nodiscard]] const ModelInfo& model() const;
  [[nodiscard]] const NodeName& name() const;
  // Names of blocks of this model, in the tenant's domain. `salt`: an adapter.
  [[nodiscard]] KeyChain Keys(const std::string& tenant, const std::string& salt = "") const;

  // Ends its tickets, leaves the cluster, joins every thread. Idempotent.
  void Close();

 private:
  class Impl;
  explicit ClusterClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvt
