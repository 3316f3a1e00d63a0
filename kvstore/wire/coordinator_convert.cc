#include "kvstore/wire/coordinator_convert.h"

#include "kernels/base/check.h"

namespace kvt::rpc {

void ToWire(const ModelInfo& from, kvtide::ModelInfo* to) {
  to->set_name(from.name);
  to->set_fingerprint(from.fingerprint);
  to->set_numerics_id(from.numerics_id);
  ToWire(from.geometry, to->mutable_geometry());
  to->set_context_tokens_max(from.context_tokens_max);
}

ModelInfo FromWire(const kvtide::ModelInfo& from) {
  ModelInfo to;
  to.name = from.name();
  to.fingerprint = from.fingerprint();
  to.numerics_id = from.numerics_id();
  to.geometry = FromWire(from.geometry());
  to.context_tokens_max = from.context_tokens_max();
  return to;
}

void ToWire(const RegisterRequest& from, kvtide::RegisterRequest* to) {
  to->set_kind(static_cast<uint32_t>(from.kind));
  to->set_name(from.name);
  to->set_epoch(from.epoch.value());
  ToWire(from.versions, to->mutable_versions());
  to->set_control_address(from.control_address);
  to->set_pid(from.pid);
  ToWire(from.model, to->mutable_model());
  to->set_capacity_bytes(from.capacity_bytes);
  to->set_batch_max(from.batch_max);
  to->set_starting(from.starting);
}

absl::StatusOr<RegisterRequest> FromWire(const kvtide::RegisterRequest& from) {
  RegisterRequest to;
  KVT_ASSIGN_OR_RETURN(to.kind, ToEnum(from.kind(), NodeKind::kClient, "register.kind"));
  to.name = from.name();
  to.epoch = BootEpoch(from.epoch());
  to.versions = FromWire(from.versions());
  to.control_address = from.control_address();
  to.pid = from.pid();
  to.model = FromWire(from.model());
  to.capacity_bytes = from.capacity_bytes();
  to.batch_max = from.batch_max();
  to.starting = from.starting();
  return to;
}

void ToWire(const RegisterReply& from, kvtide::RegisterReply* to) {
  to->set_heartbeat_interval_ns(ToNs(from.heartbeat_interval));
  to->set_lease_ns(ToNs(from.lease));
  to->set_ticket_public_key(from.ticket_public_key);
  to->set_coordinator_epoch(from.coordinator_epoch);
}

RegisterReply FromWire(const kvtide::RegisterReply& from) {
  RegisterReply to;
  to.heartbeat_interval = FromNs(from.heartbeat_interval_ns());
  to.lease = FromNs(from.lease_ns());
  to.ticket_public_key = from.ticket_public_key();
  to.coordinator_epoch = from.coordinator_epoch();
  return to;
}

void ToWire(const ClusterView& from, kvtide::ClusterView* to) {
  to->set_version(from.version);
  for (const StoreRef& store : from.stores) ToWire(store, to->add_stores());
}

ClusterView FromWire(const kvtide::ClusterView& from) {
  ClusterView to;
  to.version = from.version();
  for (const auto& store : from.stores()) to.stores.push_back(FromWire(store));
  return to;
}

void ToWire(const LoadReport& from, kvtide::LoadReport* to) {
  to->set_running(from.running);
  to->set_waiting(from.waiting);
  to->set_slots_free(from.slots_free);
  to->set_slots_total(from.slots_total);
  to->set_tokens_done(from.tokens_done);
  to->set_starting(from.starting);
  to->set_starting_percent(from.starting_percent);
  to->set_draining(from.draining);
  to->set_condition(from.condition);
  for (const TicketRef& ticket : from.tickets) ToWire(ticket, to->add_tickets());
}

LoadReport FromWire(const kvtide::LoadReport& from) {
  LoadReport to;
  to.running = from.running();
  to.waiting = from.waiting();
  to.slots_free = from.slots_free();
  to.slots_total = from.slots_total();
  to.tokens_done = from.tokens_done();
  to.starting = from.starting();
  to.starting_percent = from.starting_percent();
  to.draining = from.draining();
  to.condition = from.condition();
  for (const auto& ticket : from.tickets()) to.tickets.push_back(FromWire(ticket));
  return to;
}

void ToWire(const HeartbeatRequest& from, kvtide::HeartbeatRequest* to) {
  to->set_name(from.name);
  to->set_epoch(from.epoch.value());
  to->set_view_version(from.view_version);
  ToWire(from.load, to->mutable_load());
}

HeartbeatRequest FromWire(const kvtide::HeartbeatRequest& from) {
  HeartbeatRequest to;
  to.name = from.name();
  to.epoch = BootEpoch(from.epoch());
  to.view_version = from.view_version();
  to.load = FromWire(from.load());
  return to;
}

void ToWire(const HeartbeatReply& from, kvtide::HeartbeatReply* to) {
  ToWire(from.view, to->mutable_view());
  to->set_unknown(from.unknown);
  to->set_drain(from.drain);
  for (const TicketId id : from.cancelled) to->add_cancelled(id.value());
}

HeartbeatReply FromWire(const kvtide::HeartbeatReply& from) {
  HeartbeatReply to;
  to.view = FromWire(from.view());
  to.unknown = from.unknown();
  to.drain = from.drain();
  for (const uint64_t id : from.cancelled()) to.cancelled.push_back(TicketId(id));
  return to;
}

void ToWire(const AdmitRequest& from, kvtide::AdmitRequest* to) {
  to->set_model(from.model);
  to->set_tenant(from.tenant);
  to->set_prompt_tokens(from.prompt_tokens);
  to->set_output_tokens_max(from.output_tokens_max);
  if (from.fidelity.has_value()) to->set_fidelity(static_cast<uint32_t>(*from.fidelity));
  to->set_holder(from.holder);
}

absl::StatusOr<AdmitRequest> FromWire(const kvtide::AdmitRequest& from) {
  AdmitRequest to;
  to.model = from.model();
  to.tenant = from.tenant();
  to.prompt_tokens = from.prompt_tokens();
  to.output_tokens_max = from.output_tokens_max();
  to.holder = from.holder();
  if (from.has_fidelity()) {
    KVT_ASSIGN_OR_RETURN(to.fidelity, ToEnum(from.fidelity(), Fidelity::kSparse, "admit.fidelity"));
  }
  return to;
}

void ToWire(const AdmitReply& from, kvtide::AdmitReply* to) {
  ToWire(from.ticket, to->mutable_ticket());
  to->set_id(from.id.value());
  to->set_prefill_address(from.prefill_address);
}

AdmitReply FromWire(const kvtide::AdmitReply& from) {
  AdmitReply to;
  to.ticket = FromWire(from.ticket());
  to.id = TicketId(from.id());
  to.prefill_address = from.prefill_address();
  return to;
}

void ToWire(const PlaceRequest& from, kvtide::PlaceRequest* to) {
  ToWire(from.ticket, to->mutable_ticket());
  for (const NodeName& name : from.refused_by) to->add_refused_by(name);
}

PlaceRequest FromWire(const kvtide::PlaceRequest& from) {
  PlaceRequest to;
  to.ticket = FromWire(from.ticket());
  to.refused_by = ToVector<NodeName>(from.refused_by());
  return to;
}

void ToWire(const PlaceReply& from, kvtide::PlaceReply* to) {
  ToWire(from.ticket, to->mutable_ticket());
  to->set_decode_address(from.decode_address);
}

PlaceReply FromWire(const kvtide::PlaceReply& from) {
  PlaceReply to;
  to.ticket = FromWire(from.ticket());
  to.decode_address = from.decode_address();
  return to;
}

void ToWire(const RegrantRequest& from, kvtide::RegrantRequest* to) {
  ToWire(from.ticket, to->mutable_ticket());
  to->set_reason(from.reason);
}

RegrantRequest FromWire(const kvtide::RegrantRequest& from) {
  RegrantRequest to;
  to.ticket = FromWire(from.ticket());
  to.reason = from.reason();
  return to;
}

void ToWire(const RegrantReply& from, kvtide::RegrantReply* to) {
  ToWire(from.ticket, to->mutable_ticket());
  to->set_prefill_address(from.prefill_address);
}

RegrantReply FromWire(const kvtide::RegrantReply& from) {
  RegrantReply to;
  to.ticket = FromWire(from.ticket());
  to.prefill_address = from.prefill_address();
  return to;
}

void ToWire(const TicketUpdate& from, kvtide::TicketUpdate* to) {
  to->set_id(from.id.value());
  to->set_epoch(from.epoch.value());
  to->set_node(from.node);
  to->set_phase(static_cast<uint32_t>(from.phase));
  to->set_error(from.error);
  ToWire(from.computed, to->mutable_computed());
  to->set_output_tokens(from.output_tokens);
}

absl::StatusOr<TicketUpdate> FromWire(const kvtide::TicketUpdate& from) {
  TicketUpdate to;
  to.id = TicketId(from.id());
  to.epoch = TicketEpoch(from.epoch());
  to.node = from.node();
  KVT_ASSIGN_OR_RETURN(to.phase, ToEnum(from.phase(), RequestPhase::kCancelled, "update.phase"));
  to.error = from.error();
  to.computed = FromWire(from.computed());
  to.output_tokens = from.output_tokens();
  return to;
}

static void ToWire(const NodeStatus& from, kvtide::NodeStatus* to) {
  to->set_kind(static_cast<uint32_t>(from.kind));
  to->set_name(from.name);
  to->set_epoch(from.epoch.value());
  to->set_control_address(from.control_address);
  to->set_pid(from.pid);
  to->set_state(from.state);
  to->set_since_heartbeat_ns(ToNs(from.since_heartbeat));
  ToWire(from.model, to->mutable_model());
  to->set_capacity_bytes(from.capacity_bytes);
  ToWire(from.load, to->mutable_load());
}

static absl::StatusOr<NodeStatus> FromWire(const kvtide::NodeStatus& from) {
  NodeStatus to;
  KVT_ASSIGN_OR_RETURN(to.kind, ToEnum(from.kind(), NodeKind::kClient, "node.kind"));
  to.name = from.name();
  to.epoch = BootEpoch(from.epoch());
  to.control_address = from.control_address();
  to.pid = from.pid();
  to.state = from.state();
  to.since_heartbeat = FromNs(from.since_heartbeat_ns());
  to.model = FromWire(from.model());
  to.capacity_bytes = from.capacity_bytes();
  to.load = FromWire(from.load());
  return to;
}

void ToWire(const ClusterStatus& from, kvtide::ClusterStatus* to) {
  to->set_coordinator_epoch(from.coordinator_epoch);
  to->set_uptime_ns(ToNs(from.uptime));
  to->set_view_version(from.view_version);
  for (const NodeStatus& node : from.nodes) ToWire(node, to->add_nodes());
  to->set_admitted(from.admitted);
  to->set_running(from.running);
  to->set_done(from.done);
  to->set_failed(from.failed);
  to->set_cancelled(from.cancelled);
  to->set_refused(from.refused);
  for (const ClusterEvent& event : from.events) {
    kvtide::ClusterEvent* wire = to->add_events();
    wire->set_unix_ms(event.unix_ms);
    wire->set_text(event.text);
  }
}

absl::StatusOr<ClusterStatus> FromWire(const kvtide::ClusterStatus& from) {
  ClusterStatus to;
  to.coordinator_epoch = from.coordinator_epoch();
  to.uptime = FromNs(from.uptime_ns());
  to.view_version = from.view_version();
  for (const auto& node : from.nodes()) {
    KVT_ASSIGN_OR_RETURN(NodeStatus status, FromWire(node));
    to.nodes.push_back(std::move(status));
  }
  to.admitted = from.admitted();
  to.running = from.running();
  to.done = from.done();
  to.failed = from.failed();
  to.cancelled = from.cancelled();
  to.refused = from.refused();
  for (const auto& event : from.events()) {
    to.events.push_back(ClusterEvent{.unix_ms = event.unix_ms(), .text = event.text()});
  }
  return to;
}

void ToWire(const RequestStatus& from, kvtide::RequestStatus* to) {
  to->set_id(from.id.value());
  to->set_epoch(from.epoch.value());
  to->set_tenant(from.tenant);
  to->set_model(from.model);
  to->set_phase(static_cast<uint32_t>(from.phase));
  to->set_prefill_worker(from.prefill_worker);
  to->set_decode_worker(from.decode_worker);
  to->set_prompt_tokens(from.prompt_tokens);
  to->set_output_tokens(from.output_tokens);
  to->set_fidelity(static_cast<uint32_t>(from.fidelity));
  to->set_request_class(static_cast<uint32_t>(from.request_class));
  ToWire(from.computed, to->mutable_computed());
  to->set_age_ns(ToNs(from.age));
  to->set_error(from.error);
}

absl::StatusOr<RequestStatus> FromWire(const kvtide::RequestStatus& from) {
  RequestStatus to;
  to.id = TicketId(from.id());
  to.epoch = TicketEpoch(from.epoch());
  to.tenant = from.tenant();
  to.model = from.model();
  KVT_ASSIGN_OR_RETURN(to.phase, ToEnum(from.phase(), RequestPhase::kCancelled, "request.phase"));
  to.prefill_worker = from.prefill_worker();
  to.decode_worker = from.decode_worker();
  to.prompt_tokens = from.prompt_tokens();
  to.output_tokens = from.output_tokens();
  KVT_ASSIGN_OR_RETURN(to.fidelity, ToEnum(from.fidelity(), Fidelity::kSparse, "request.fidelity"));
  KVT_ASSIGN_OR_RETURN(to.request_class, ToEnum(from.request_class(), RequestClass::kOffloaded,
                                                "request.request_class"));
  to.computed = FromWire(from.computed());
  to.age = FromNs(from.age_ns());
  to.error = from.error();
  return to;
}

}  // namespace kvt::rpc
