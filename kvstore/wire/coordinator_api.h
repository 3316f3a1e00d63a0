// What nodes, front ends and operators ask of the coordinator. Neither prompts nor tokens pass
// through it (DESIGN 7). Implemented by coordinator/ and by the gRPC client stub
// (coordinator_rpc.h), which also serves an implementation. Thread-safe; stub calls end by deadline.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/ids.h"
#include "kernels/layout/geometry.h"
#include "kvstore/wire/ticket.h"
#include "kvstore/wire/version.h"

namespace kvt {

// kClient: a program that uses the tier for itself (kvstore/client/cluster_client.h). It holds tickets
// that name it, serves nobody and is never routed to.
enum class NodeKind : uint8_t { kStore = 0, kPrefill = 1, kDecode = 2, kClient = 3 };

struct ModelInfo {
  std::string name;
  std::string fingerprint;
  std::string numerics_id;
  Geometry geometry;
  uint32_t context_tokens_max = 0;
};

struct RegisterRequest {
  NodeKind kind = NodeKind::kStore;
  NodeName name;
  BootEpoch epoch;
  WireVersionRange versions;
  std::string control_address;  // where its gRPC service listens; clients have none
  int64_t pid = 0;
  ModelInfo model;              // workers and clients
  uint64_t capacity_bytes = 0;  // stores: arena; decode: slots
  uint32_t batch_max = 0;       // decode
  // Alive but not ready: nobody is sent to it before a heartbeat says that it is.
  bool starting = false;
};
struct RegisterReply {
  absl::Duration heartbeat_interval;
  absl::Duration lease;            // a worker that could not renew for this long fences itself
  std::string ticket_public_key;   // 32 bytes
  std::string coordinator_epoch;   // changes when the coordinator restarts
};

struct ClusterView {
  uint64_t version = 0;
  std::vector<StoreRef> stores;  // alive and not draining
};

// What a worker reports; the coordinator decides by it and shows it.
struct LoadReport {
  uint32_t running = 0;
  uint32_t waiting = 0;
  uint64_t slots_free = 0;
  uint64_t slots_total = 0;
  uint64_t tokens_done = 0;      // since boot
  bool starting = false;         // as RegisterRequest::starting
  uint32_t starting_percent = 0; // how far it is
  bool draining = false;         // it is stopping and takes nothing new
  std::vector<TicketRef> tickets;  // held here
  std::string condition{};         // what people should know of it; empty: it is well
};

struct HeartbeatRequest {
  NodeName name;
  BootEpoch epoch;
  uint64_t view_version = 0;  // what the node has; 0: none
  LoadReport load;
};
struct HeartbeatReply {
  ClusterView view;            // filled when newer than view_version
  bool unknown = false;        // register again
  bool drain = false;
  std::vector<TicketId> cancelled;  // tickets of this node that a front end cancelled or that died
};

struct AdmitRequest {
  std::string model;
  std::string tenant;
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens_max = 0;
  std::optional<Fidelity> fidelity;  // none: the tenant's default
  // A registered client that will hold the ticket itself: needs no worker. Empty: a prefill worker.
  NodeName holder = {};
};
struct AdmitReply {
  SignedTicket ticket;  // grant P
  TicketId id;
  std::string prefill_address;  // empty for a client's ticket
};

// Grant D, asked by the prefill worker near its last chunk; or again after a refusal.
struct PlaceRequest {
  SignedTicket ticket;
  std::vector<NodeName> refused_by;  // decode workers that refused this hand-over
};
struct PlaceReply {
  SignedTicket ticket;  // same epoch, decode_worker set
  std::string decode_address;
};

// A holder lost blocks: a higher epoch and a prefill worker for the suffix. The decode worker stays.
struct RegrantRequest {
  SignedTicket ticket;
  std::string reason;
};
struct RegrantReply {
  SignedTicket ticket;  // epoch raised, decode_worker kept, placement on the current view
  std::string prefill_address;
};

enum class RequestPhase : uint8_t { kAdmitted = 0, kPrefill, kHandOver, kDecode, kDone, kFailed, kCancelled };

// Tokens by how their KV was computed.
struct TokenCounts {
  uint64_t exact = 0;
  uint64_t base = 0;
  uint64_t sparse = 0;
};

// What a worker reports of a ticket when its phase changes or ends.
struct TicketUpdate {
  TicketId id;
  TicketEpoch epoch;
  NodeName node;
  RequestPhase phase = RequestPhase::kAdmitted;
  std::string error;  // for kFailed
  TokenCounts computed;
  uint64_t output_tokens = 0;
};

struct NodeStatus {
  NodeKind kind = NodeKind::kStore;
  NodeName name;
  BootEpoch epoch;
  std::string control_address;
  int64_t pid = 0;
  std::string state;  // "starting", "ready", "draining", "dead"
  absl::Duration since_heartbeat;
  ModelInfo model;
  uint64_t capacity_bytes = 0;
  LoadReport load;
};

struct ClusterEvent {
  int64_t unix_ms = 0;
  std::string text;  // "decode-1 declared dead: no heartbeat for 2.1 s; 3 requests failed"
};

struct ClusterStatus {
  std::string coordinator_epoch;
  absl::Duration uptime;
  uint64_t view_version = 0;
  std::vector<NodeStatus> nodes;
  uint64_t admitted = 0, running = 0, done = 0, failed = 0, cancelled = 0, refused = 0;
  std::vector<ClusterEvent> events;  // the latest, oldest first
};

struct RequestStatus {
  TicketId id;
  TicketEpoch epoch;
  std::string tenant;
  std::string model;
  RequestPhase phase = RequestPhase::kAdmitted;
  NodeName prefill_worker;
  NodeName decode_worker;
  uint32_t prompt_tokens = 0;
  uint64_t output_tokens = 0;
  Fidelity fidelity = Fidelity::kExact;
  RequestClass request_class = RequestClass::kResident;
  TokenCounts computed;
  absl::Duration age;
  std::string error;
};

class CoordinatorApi {
 public:
  virtual ~CoordinatorApi() = default;
  virtual absl::StatusOr<RegisterReply> Register(const RegisterRequest& request) = 0;
  virtual absl::StatusOr<HeartbeatReply> Heartbeat(const HeartbeatRequest& request) = 0;
  virtual absl::Status Leave(const NodeName& name, BootEpoch epoch) = 0;
  // NotFound: unknown model (the message lists the known ones). FailedPrecondition: no prefill, decode
  // or store node is alive, or the holder is no ready client (named). InvalidArgument: empty prompt,
  // beyond the model's context. PermissionDenied: a fidelity looser than the tenant's.
  // ResourceExhausted: too many requests.
  virtual absl::StatusOr<AdmitReply> Admit(const AdmitRequest& request) = 0;
  virtual absl::StatusOr<PlaceReply> Place(const PlaceRequest& request) = 0;
  virtual absl::StatusOr<RegrantReply> Regrant(const RegrantRequest& request) = 0;
  // By whoever knows the ticket's capability. Idempotent.
  virtual absl::Status Cancel(TicketId id, const std::string& capability) = 0;
  virtual absl::Status Update(const std::vector<TicketUpdate>& updates) = 0;
  virtual absl::StatusOr<ClusterView> View() = 0;
  virtual absl::StatusOr<ClusterStatus> Status() = 0;
  virtual absl::StatusOr<std::vector<RequestStatus>> Requests() = 0;
  virtual absl::StatusOr<std::vector<ModelInfo>> Models() = 0;
};

}  // namespace kvt
