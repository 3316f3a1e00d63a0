#include "kvstore/wire/store_convert.h"

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/limits.h"
#include "kvstore/wire/wire_convert.h"

namespace kvt::rpc {
namespace {

absl::Status CheckCount(int count, int count_max, absl::string_view field) {
  if (count <= count_max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", count, " entries, at most ", count_max));
}

void PutKey(const BlockKey& from, std::string* to) {
  to->assign(reinterpret_cast<const char*>(from.bytes.data()), from.bytes.size());
}

absl::Status GetKey(const std::string& from, absl::string_view field, BlockKey* to) {
  if (from.size() != to->bytes.size()) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", from.size(), " bytes, not 16"));
  }
  std::memcpy(to->bytes.data(), from.data(), to->bytes.size());
  return absl::OkStatus();
}

void PutName(const BlockName& from, kvtide::BlockName* to) {
  PutKey(from.key, to->mutable_key());
  PutKey(from.parent, to->mutable_parent());
  to->mutable_tokens()->Add(from.tokens.begin(), from.tokens.end());
  to->set_provenance(static_cast<uint32_t>(from.provenance));
  to->set_ticket_private(from.ticket_private);
}

absl::Status GetName(const kvtide::BlockName& from, BlockName* to) {
  KVT_RETURN_IF_ERROR(GetKey(from.key(), "blocks.key", &to->key));
  KVT_RETURN_IF_ERROR(GetKey(from.parent(), "blocks.parent", &to->parent));
  KVT_RETURN_IF_ERROR(CheckCount(from.tokens_size(), kBlockTokens, "blocks.tokens"));
  to->tokens.assign(from.tokens().begin(), from.tokens().end());
  KVT_ASSIGN_OR_RETURN(to->provenance,
                       ToEnum(from.provenance(), Provenance::kSparse, "blocks.provenance"));
  to->ticket_private = from.ticket_private();
  return absl::OkStatus();
}

template <typename Names>
absl::Status GetNames(const Names& from, std::vector<BlockName>* to) {
  KVT_RETURN_IF_ERROR(CheckCount(from.size(), kSequenceBlocksMax, "blocks"));
  to->resize(from.size());
  for (int i = 0; i < from.size(); ++i) KVT_RETURN_IF_ERROR(GetName(from[i], &(*to)[i]));
  return absl::OkStatus();
}

void PutChecksums(const std::vector<uint64_t>& from, std::string* to) {
  to->assign(reinterpret_cast<const char*>(from.data()), from.size() * sizeof(uint64_t));
}

absl::Status GetChecksums(const std::string& from, absl::string_view field,
                          std::vector<uint64_t>* to) {
  if (from.size() % sizeof(uint64_t) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", from.size(), " bytes"));
  }
  to->resize(from.size() / sizeof(uint64_t));
  if (!from.empty()) std::memcpy(to->data(), from.data(), from.size());
  return absl::OkStatus();
}

template <typename Repeated>
void PutPlanes(const std::array<uint64_t, kPlanes>& from, Repeated* to) {
  to->Add(from.begin(), from.end());
}

template <typename Repeated>
absl::Status GetPlanes(const Repeated& from, absl::string_view field,
                       std::array<uint64_t, kPlanes>* to) {
  KVT_RETURN_IF_ERROR(CheckCount(from.size(), kPlanes, field));
  for (int i = 0; i < from.size(); ++i) (*to)[i] = from[i];
  return absl::OkStatus();
}

void PutPlace(const BlockPlace& from, kvtide::BlockPlace* to) {
  to->set_handle(from.handle);
  to->set_base_offset_plus_1(from.base_offset + 1);  // kNoOffset becomes 0
  to->set_residual_offset_plus_1(from.residual_offset + 1);
  to->set_base_on_disk(from.base_on_disk);
  to->set_residual_on_disk(from.residual_on_disk);
  PutChecksums(from.base_checksums, to->mutable_base_checksums());
  PutChecksums(from.residual_checksums, to->mutable_residual_checksums());
}
static_assert(kNoOffset + 1 == 0);

absl::Status GetPlace(const kvtide::BlockPlace& from, BlockPlace* to) {
  to->handle = from.handle();
  to->base_offset = from.base_offset_plus_1() - 1;
  to->residual_offset = from.residual_offset_plus_1() - 1;
  to->base_on_disk = from.base_on_disk();
  to->residual_on_disk = from.residual_on_disk();
  KVT_RETURN_IF_ERROR(GetChecksums(from.base_checksums(), "base_checksums", &to->base_checksums));
  return GetChecksums(from.residual_checksums(), "residual_checksums", &to->residual_checksums);
}

}  // namespace

void ToWire(const OpenSessionRequest& from, kvtide::OpenSessionRequest* to) {
  to->set_worker(from.worker);
  to->set_worker_epoch(from.worker_epoch.value());
  ToWire(from.versions, to->mutable_versions());
  ToWire(from.geometry, to->mutable_geometry());
  to->set_model_fingerprint(from.model_fingerprint);
  to->set_numerics_id(from.numerics_id);
}

OpenSessionRequest FromWire(const kvtide::OpenSessionRequest& from) {
  OpenSessionRequest to;
  to.worker = from.worker();
  to.worker_epoch = BootEpoch(from.worker_epoch());
  to.versions = FromWire(from.versions());
  to.geometry = FromWire(from.geometry());
  to.model_fingerprint = from.model_fingerprint();
  to.numerics_id = from.numerics_id();
  return to;
}

void ToWire(const OpenSessionReply& from, kvtide::OpenSessionReply* to) {
  to->set_session(from.session.value());
  to->set_secret(from.secret);
  to->set_wire_version(from.wire_version);
  to->set_lease_ns(ToNs(from.lease));
  to->set_store_epoch(from.store_epoch.value());
  to->set_host_id(from.host_id);
  to->set_ucx_address(from.ucx_address);
  to->set_shm_socket(from.shm_socket);
  to->set_ucx_settings(from.ucx_settings);
}

absl::StatusOr<OpenSessionReply> FromWire(const kvtide::OpenSessionReply& from) {
  if (from.secret().size() != kSessionSecretBytes) {
    return absl::InvalidArgumentError(absl::StrCat("secret: ", from.secret().size(), " bytes"));
  }
  OpenSessionReply to;
  to.session = SessionId(from.session());
  to.secret = from.secret();
  to.wire_version = from.wire_version();
  to.lease = FromNs(from.lease_ns());
  to.store_epoch = BootEpoch(from.store_epoch());
  to.host_id = from.host_id();
  to.ucx_address = from.ucx_address();
  to.shm_socket = from.shm_socket();
  to.ucx_settings = from.ucx_settings();
  return to;
}

void ToWire(const LookupRequest& from, kvtide::LookupRequest* to) {
  to->set_session(from.session.value());
  ToWire(from.ticket, to->mutable_ticket());
  for (const BlockName& name : from.blocks) PutName(name, to->add_blocks());
}

absl::StatusOr<LookupRequest> FromWire(const kvtide::LookupRequest& from) {
  LookupRequest to;
  to.session = SessionId(from.session());
  to.ticket = FromWire(from.ticket());
  KVT_RETURN_IF_ERROR(GetNames(from.blocks(), &to.blocks));
  return to;
}

void ToWire(const LookupReply& from, kvtide::LookupReply* to) {
  for (const LookupReply::Block& block : from.blocks) {
    kvtide::LookupReply::Block* out = to->add_blocks();
    out->set_presence(static_cast<uint32_t>(block.presence));
    if (block.presence != BlockPresence::kAbsent) PutPlace(block.place, out->mutable_place());
  }
}

absl::StatusOr<LookupReply> FromWire(const kvtide::LookupReply& from) {
  LookupReply to;
  to.blocks.resize(from.blocks_size());
  for (int i = 0; i < from.blocks_size(); ++i) {
    KVT_ASSIGN_OR_RETURN(to.blocks[i].presence,
                         ToEnum(from.blocks(i).presence(), BlockPresence::kExact, "presence"));
    KVT_RETURN_IF_ERROR(GetPlace(from.blocks(i).place(), &to.blocks[i].place));
  }
  return to;
}

void ToWire(const ReserveRequest& from, kvtide::ReserveRequest* to) {
  to->set_session(from.session.value());
  ToWire(from.ticket, to->mutable_ticket());
  for (const BlockName& name : from.blocks) PutName(name, to->add_blocks());
  to->set_output_blocks(from.output_blocks);
  to->set_waited_ns(ToNs(from.waited));
}

absl::StatusOr<ReserveRequest> FromWire(const kvtide::ReserveRequest& from) {
  ReserveRequest to;
  to.session = SessionId(from.session());
  to.ticket = FromWire(from.ticket());
  KVT_RETURN_IF_ERROR(GetNames(from.blocks(), &to.blocks));
  to.output_blocks = from.output_blocks();
  to.waited = FromNs(from.waited_ns());
  return to;
}

void ToWire(const ReserveReply& from, kvtide::ReserveReply* to) {
  to->set_pending(from.pending);
  for (const ReserveReply::Block& block : from.blocks) {
    kvtide::ReserveReply::Block* out = to->add_blocks();
    out->set_already_sealed(block.already_sealed);
    PutPlace(block.place, out->mutable_place());
  }
}

absl::StatusOr<ReserveReply> FromWire(const kvtide::ReserveReply& from) {
  ReserveReply to;
  to.pending = from.pending();
  to.blocks.resize(from.blocks_size());
  for (int i = 0; i < from.blocks_size(); ++i) {
    to.blocks[i].already_sealed = from.blocks(i).already_sealed();
    KVT_RETURN_IF_ERROR(GetPlace(from.blocks(i).place(), &to.blocks[i].place));
  }
  return to;
}

void ToWire(const SealRequest& from, kvtide::SealRequest* to) {
  to->set_session(from.session.value());
  ToWire(from.ticket, to->mutable_ticket());
  to->mutable_handles()->Add(from.handles.begin(), from.handles.end());
}

absl::StatusOr<SealRequest> FromWire(const kvtide::SealRequest& from) {
  KVT_RETURN_IF_ERROR(CheckCount(from.handles_size(), kSequenceBlocksMax, "handles"));
  SealRequest to;
  to.session = SessionId(from.session());
  to.ticket = FromWire(from.ticket());
  to.handles.assign(from.handles().begin(), from.handles().end());
  return to;
}

void ToWire(const SealReply& from, kvtide::SealReply* to) {
  for (const SealReply::Block& block : from.blocks) {
    kvtide::SealReply::Block* out = to->add_blocks();
    out->set_outcome(static_cast<uint32_t>(block.outcome));
    out->set_handle(block.handle);
  }
}

absl::StatusOr<SealReply> FromWire(const kvtide::SealReply& from) {
  SealReply to;
  to.blocks.resize(from.blocks_size());
  for (int i = 0; i < from.blocks_size(); ++i) {
    KVT_ASSIGN_OR_RETURN(to.blocks[i].outcome,
                         ToEnum(from.blocks(i).outcome(), SealReply::Outcome::kLost, "outcome"));
    to.blocks[i].handle = from.blocks(i).handle();
  }
  return to;
}

void ToWire(const VerifyRequest& from, kvtide::VerifyRequest* to) {
  to->set_session(from.session.value());
  ToWire(from.ticket, to->mutable_ticket());
  to->mutable_records()->Add(from.records.begin(), from.records.end());
}

absl::StatusOr<VerifyRequest> FromWire(const kvtide::VerifyRequest& from) {
  KVT_RETURN_IF_ERROR(CheckCount(from.records_size(), kPlanes * kSequenceBlocksMax, "records"));
  VerifyRequest to;
  to.session = SessionId(from.session());
  to.ticket = FromWire(from.ticket());
  to.records.assign(from.records().begin(), from.records().end());
  return to;
}

void ToWire(const PromoteRequest& from, kvtide::PromoteRequest* to) {
  to->set_session(from.session.value());
  ToWire(from.ticket, to->mutable_ticket());
  to->mutable_records()->Add(from.records.begin(), from.records.end());
  to->set_wait_ns(ToNs(from.wait));
}

absl::StatusOr<PromoteRequest> FromWire(const kvtide::PromoteRequest& from) {
  KVT_RETURN_IF_ERROR(CheckCount(from.records_size(), kPlanes * kSequenceBlocksMax, "records"));
  PromoteRequest to;
  to.session = SessionId(from.session());
  to.ticket = FromWire(from.ticket());
  to.records.assign(from.records().begin(), from.records().end());
  to.wait = FromNs(from.wait_ns());
  return to;
}

void ToWire(const PromoteReply& from, kvtide::PromoteReply* to) {
  for (const auto outcome : from.outcomes) to->add_outcomes(static_cast<uint32_t>(outcome));
  to->set_bytes_from_disk(from.bytes_from_disk);
}

absl::StatusOr<PromoteReply> FromWire(const kvtide::PromoteReply& from) {
  PromoteReply to;
  to.outcomes.resize(from.outcomes_size());
  for (int i = 0; i < from.outcomes_size(); ++i) {
    KVT_ASSIGN_OR_RETURN(to.outcomes[i],
                         ToEnum(from.outcomes(i), PromoteReply::Outcome::kLate, "outcome"));
  }
  to.bytes_from_disk = from.bytes_from_disk();
  return to;
}

void ToWire(const PurgeTenantRequest& from, kvtide::PurgeTenantRequest* to) {
  to->set_tenant(from.tenant);
  to->set_wait_ns(ToNs(from.wait));
}

PurgeTenantRequest FromWire(const kvtide::PurgeTenantRequest& from) {
  return PurgeTenantRequest{from.tenant(), FromNs(from.wait_ns())};
}

void ToWire(const PurgeTenantReply& from, kvtide::PurgeTenantReply* to) {
  to->set_blocks(from.blocks);
  to->set_memory_bytes(from.memory_bytes);
  to->set_disk_reclaimed(from.disk_reclaimed);
}

absl::StatusOr<PurgeTenantReply> FromWire(const kvtide::PurgeTenantReply& from) {
  return PurgeTenantReply{from.blocks(), from.memory_bytes(), from.disk_reclaimed()};
}

void ToWire(const ReleaseRequest& from, kvtide::ReleaseRequest* to) {
  to->set_session(from.session.value());
  ToWire(from.ticket, to->mutable_ticket());
}

ReleaseRequest FromWire(const kvtide::ReleaseRequest& from) {
  return ReleaseRequest{SessionId(from.session()), FromWire(from.ticket())};
}

void ToWire(const RenewRequest& from, kvtide::RenewRequest* to) {
  to->set_session(from.session.value());
  for (const TicketRef& ticket : from.live) ToWire(ticket, to->add_live());
}

absl::StatusOr<RenewRequest> FromWire(const kvtide::RenewRequest& from) {
  KVT_RETURN_IF_ERROR(CheckCount(from.live_size(), kStoreTicketsMax, "live"));
  RenewRequest to;
  to.session = SessionId(from.session());
  to.live.reserve(from.live_size());
  for (const kvtide::TicketRef& ticket : from.live()) to.live.push_back(FromWire(ticket));
  return to;
}

void ToWire(const StoreStats& from, kvtide::StoreStats* to) {
  to->set_name(from.name);
  to->set_epoch(from.epoch.value());
  to->set_capacity_bytes(from.capacity_bytes);
  to->set_used_bytes(from.used_bytes);
  PutPlanes(from.resident_bytes, to->mutable_resident_bytes());
  to->set_reserved_bytes(from.reserved_bytes);
  to->set_writing_bytes(from.writing_bytes);
  to->set_evicting_bytes(from.evicting_bytes);
  to->set_blocks(from.blocks);
  to->set_pinned_blocks(from.pinned_blocks);
  to->set_pins(from.pins);
  to->set_in_flight(from.in_flight);
  to->set_output_reserved_blocks(from.output_reserved_blocks);
  to->set_sessions(from.sessions);
  to->set_tickets(from.tickets);
  to->set_lookups(from.lookups);
  to->set_lookup_blocks(from.lookup_blocks);
  to->set_hit_blocks(from.hit_blocks);
  to->set_base_only_blocks(from.base_only_blocks);
  to->set_evicted_blocks(from.evicted_blocks);
  to->set_refused(from.refused);
  to->set_pulled_bytes(from.pulled_bytes);
  to->set_pushed_bytes(from.pushed_bytes);
  to->set_checksum_failures(from.checksum_failures);
  to->set_mismatched_blocks(from.mismatched_blocks);
  to->set_lapsed_leases(from.lapsed_leases);
  PutPlanes(from.disk_bytes, to->mutable_disk_bytes());
  PutPlanes(from.disk_records, to->mutable_disk_records());
  to->set_disk_used_bytes(from.disk_used_bytes);
  to->set_disk_quota_bytes(from.disk_quota_bytes);
  to->set_spill_queue_bytes(from.spill_queue_bytes);
  to->set_promote_queue_bytes(from.promote_queue_bytes);
  PutPlanes(from.spilled, to->mutable_spilled());
  PutPlanes(from.promoted, to->mutable_promoted());
  PutPlanes(from.dropped, to->mutable_dropped());
  to->set_spill_failures(from.spill_failures);
  to->set_promote_failures(from.promote_failures);
  to->set_disk_failing(from.disk_failing);
  to->set_index_bytes(from.index_bytes);
  to->set_tenant_refused(from.tenant_refused);
  to->set_spill_waits(from.spill_waits);
  to->set_promote_retries(from.promote_retries);
  to->set_disk_limit_bytes(from.disk_limit_bytes);
  for (const TenantBytes& tenant : from.tenants) {
    kvtide::TenantBytes* const out = to->add_tenants();
    out->set_tenant(tenant.tenant);
    out->set_memory_bytes(tenant.memory_bytes);
    out->set_disk_bytes(tenant.disk_bytes);
  }
}

absl::StatusOr<StoreStats> FromWire(const kvtide::StoreStats& from) {
  StoreStats to;
  to.name = from.name();
  to.epoch = BootEpoch(from.epoch());
  to.capacity_bytes = from.capacity_bytes();
  to.used_bytes = from.used_bytes();
  KVT_RETURN_IF_ERROR(GetPlanes(from.resident_bytes(), "resident_bytes", &to.resident_bytes));
  to.reserved_bytes = from.reserved_bytes();
  to.writing_bytes = from.writing_bytes();
  to.evicting_bytes = from.evicting_bytes();
  to.blocks = from.blocks();
  to.pinned_blocks = from.pinned_blocks();
  to.pins = from.pins();
  to.in_flight = from.in_flight();
  to.output_reserved_blocks = from.output_reserved_blocks();
  to.sessions = from.sessions();
  to.tickets = from.tickets();
  to.lookups = from.lookups();
  to.lookup_blocks = from.lookup_blocks();
  to.hit_blocks = from.hit_blocks();
  to.base_only_blocks = from.base_only_blocks();
  to.evicted_blocks = from.evicted_blocks();
  to.refused = from.refused();
  to.pulled_bytes = from.pulled_bytes();
  to.pushed_bytes = from.pushed_bytes();
  to.checksum_failures = from.checksum_failures();
  to.mismatched_blocks = from.mismatched_blocks();
  to.lapsed_leases = from.lapsed_leases();
  KVT_RETURN_IF_ERROR(GetPlanes(from.disk_bytes(), "disk_bytes", &to.disk_bytes));
  KVT_RETURN_IF_ERROR(GetPlanes(from.disk_records(), "disk_records", &to.disk_records));
  to.disk_used_bytes = from.disk_used_bytes();
  to.disk_quota_bytes = from.disk_quota_bytes();
  to.spill_queue_bytes = from.spill_queue_bytes();
  to.promote_queue_bytes = from.promote_queue_bytes();
  KVT_RETURN_IF_ERROR(GetPlanes(from.spilled(), "spilled", &to.spilled));
  KVT_RETURN_IF_ERROR(GetPlanes(from.promoted(), "promoted", &to.promoted));
  KVT_RETURN_IF_ERROR(GetPlanes(from.dropped(), "dropped", &to.dropped));
  to.spill_failures = from.spill_failures();
  to.promote_failures = from.promote_failures();
  to.disk_failing = from.disk_failing();
  to.index_bytes = from.index_bytes();
  to.tenant_refused = from.tenant_refused();
  to.spill_waits = from.spill_waits();
  to.promote_retries = from.promote_retries();
  to.disk_limit_bytes = from.disk_limit_bytes();
  for (const kvtide::TenantBytes& tenant : from.tenants()) {
    to.tenants.push_back({tenant.tenant(), tenant.memory_bytes(), tenant.disk_bytes()});
  }
  return to;
}

}  // namespace kvt::rpc
