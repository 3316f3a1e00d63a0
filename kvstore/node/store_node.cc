// Control calls. The data plane's side: store_node_data.cc.
#include "kvstore/node/store_node.h"

#include <openssl/rand.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"

namespace kvt {
namespace {

IndexOptions MakeIndexOptions(const StoreNodeConfig& config, const Arena& arena) {
  IndexOptions options;
  options.arena_bytes = arena.size();
  options.slab_bytes = config.slab_bytes;
  options.blocks_max = config.blocks_max;
  options.lease = config.lease;
  options.stall_after = kStoreStallAfter;
  options.boot = config.epoch.value();
  options.tenant_bytes_max = config.tenant_bytes_max;
  options.tenant_disk_bytes_max = config.tenant_disk_bytes_max;
  options.has_disk = config.has_disk;
  options.disk_bytes_max = config.disk_bytes_max;
  options.spill_one_time = config.spill_one_time;
  options.high_watermark = config.spill_high_watermark;
  options.low_watermark = config.spill_low_watermark;
  options.promoted_hold = config.promoted_hold;
  return options;
}

Provenance ProvenanceOf(Fidelity fidelity) {
  switch (fidelity) {
    case Fidelity::kExact:
      return Provenance::kExact;
    case Fidelity::kElastic:
      return Provenance::kBase;
    case Fidelity::kSparse:
      return Provenance::kSparse;
  }
  KVT_CHECK(false, "fidelity ", static_cast<int>(fidelity));
}

TicketClaim ClaimOf(const Ticket& ticket) {
  return TicketClaim{ticket.id, ticket.epoch, ticket.tenant, ProvenanceOf(ticket.fidelity)};
}

SealReply::Outcome OutcomeOf(IndexSealOutcome outcome) {
  switch (outcome) {
    case IndexSealOutcome::kSealed:
      return SealReply::Outcome::kSealed;
    case IndexSealOutcome::kIncomplete:
      return SealReply::Outcome::kIncomplete;
    case IndexSealOutcome::kWinnerElsewhere:
      return SealReply::Outcome::kWinnerElsewhere;
    case IndexSealOutcome::kLost:
      return SealReply::Outcome::kLost;
  }
  KVT_CHECK(false, "outcome ", static_cast<int>(outcome));
}

LiveTicket ToLive(const TicketRef& ticket) { return LiveTicket{ticket.id, ticket.epoch}; }

template <typename Found>  // FoundBlock, ReservedBlock
void SetPlace(const Found& found, BlockPlace* place) {
  place->handle = found.handle;
  place->base_offset = found.offset[static_cast<size_t>(Plane::kBase)];
  place->residual_offset = found.offset[static_cast<size_t>(Plane::kResidual)];
  place->base_on_disk = found.on_disk[static_cast<size_t>(Plane::kBase)];
  place->residual_on_disk = found.on_disk[static_cast<size_t>(Plane::kResidual)];
}

// Unpredictable, never zero.
SessionId NewSessionId() {
  uint64_t id = 0;
  while (id == 0) {
    KVT_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(&id), sizeof(id)) == 1);
  }
  return SessionId(id);
}

std::string NewSecret() {
  std::string secret(kSessionSecretBytes, '\0');
  KVT_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(secret.data()),
                       static_cast<int>(secret.size())) == 1);
  return secret;
}

}  // namespace

StoreNode::StoreNode(const StoreNodeConfig& config, Arena& arena, const Clock& clock)
    : config_(config),
      arena_(arena),
      clock_(clock),
      publisher_(arena.table()),
      index_(MakeIndexOptions(config, arena), publisher_) {
  KVT_CHECK(arena.table().records() >= uint64_t{config.blocks_max} * kPlanes, "record table of ",
            arena.table().records(), " for ", config.blocks_max, " blocks");
}

void StoreNode::SetDataPlane(DataPlaneAddresses addresses) {
  MutexLock lock(mu_);
  addresses_ = std::move(addresses);
}

void StoreNode::Tick() {
  std::vector<NodeName> lapsed;
  {
    MutexLock lock(mu_);
    index_.NoteTime(clock_.Now());
    lapsed = index_.TakeLapsed();
    if (index_.WantsSpill()) spill_work_.NotifyOne();
  }
  for (const NodeName& worker : lapsed) {
    KVT_LOG(kWarning, "the lease of ", worker, " ended: its pins and reservations are gone");
  }
}

bool StoreNode::IsQuiet() {
  MutexLock lock(mu_);
  return index_.Stats().in_flight == 0;
}

StoreStats StoreNode::StatsNow() {
  MutexLock lock(mu_);
  const IndexStats index = index_.Stats();
  StoreStats stats;
  stats.name = config_.name;
  stats.epoch = config_.epoch;
  stats.capacity_bytes = index.capacity_bytes;
  stats.used_bytes = index.used_bytes;
  stats.resident_bytes = index.resident_bytes;
  stats.reserved_bytes = index.reserved_bytes;
  stats.writing_bytes = index.writing_bytes;
  stats.evicting_bytes = index.evicting_bytes;
  stats.blocks = index.blocks;
  stats.pinned_blocks = index.pinned_blocks;
  stats.pins = index.pins;
  stats.in_flight = index.in_flight;
  stats.output_reserved_blocks = index.output_reserved_blocks;
  stats.sessions = index.sessions;
  stats.tickets = index.tickets;
  stats.lookups = index.lookups;
  stats.lookup_blocks = index.lookup_blocks;
  stats.hit_blocks = index.hit_blocks;
  stats.base_only_blocks = index.base_only_blocks;
  stats.evicted_blocks = index.evicted_blocks;
  stats.refused = index.refused;
  stats.mismatched_blocks = index.mismatched_blocks;
  stats.lapsed_leases = index.lapsed_leases;
  stats.pulled_bytes = pulled_bytes_;
  stats.pushed_bytes = pushed_bytes_;
  stats.checksum_failures = checksum_failures_;
  FillDiskStats(index, &stats);
  return stats;
}

absl::StatusOr<StoreStats> StoreNode::Stats() {
  StoreStats stats = StatsNow();
  MutexLock lock(mu_);
  for (auto& [tenant, bytes] : index_.TopTenants(kTenantsShownMax)) {
    stats.tenants.push_back({std::move(tenant), bytes.memory, bytes.disk});
  }
  return stats;
}

absl::Status StoreNode::CheckNotDraining() const {
  if (!draining_.load()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("store ", config_.name, " is draining"));
}

absl::Status StoreNode::CheckModel(SessionId id, const Ticket& ticket) {
  const Session* const session = index_.FindSession(id);
  if (session == nullptr) return absl::OkStatus();  // the index refuses, in its words
  if (session->model_fingerprint == ticket.model_fingerprint &&
      session->numerics_id == ticket.numerics_id) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the ticket is for model ", ticket.model_fingerprint, " (", ticket.numerics_id,
                   "), the session of ", session->worker, " for ", session->model_fingerprint, " (",
                   session->numerics_id, ")"));
}

absl::StatusOr<OpenSessionReply> StoreNode::OpenSession(const OpenSessionRequest& request) {
  KVT_RETURN_IF_ERROR(CheckNotDraining());
  if (const int percent = starting_percent_.load(); percent != kReady) {
    return absl::UnavailableError(absl::StrCat("store ", config_.name, " is starting: ", percent,
                                               " % of its memory is ready; try again"));
  }
  const std::optional<uint32_t> version = CommonWireVersion(request.versions, config_.versions);
  if (!version.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("wire versions: ", request.worker, " speaks ", request.versions.min, " to ",
                     request.versions.max, ", store ", config_.name, " ", config_.versions.min,
                     " to ", config_.versions.max, "; update the older one"));
  }
  OpenSessionReply reply;
  reply.session = NewSessionId();
  reply.secret = NewSecret();
  reply.wire_version = *version;
  reply.lease = config_.lease;
  reply.store_epoch = config_.epoch;
  reply.host_id = config_.host_id;
  SessionSpec spec;
  spec.id = reply.session;
  spec.secret = reply.secret;
  spec.worker = request.worker;
  spec.worker_epoch = request.worker_epoch;
  spec.geometry = request.geometry;
  spec.model_fingerprint = request.model_fingerprint;
  spec.numerics_id = request.numerics_id;
  {
    MutexLock lock(mu_);
    KVT_RETURN_IF_ERROR(index_.OpenSession(clock_.Now(), std::move(spec)));
    reply.ucx_address = addresses_.ucx_address;
    reply.shm_socket = addresses_.shm_socket;
  }
  KVT_LOG(kInfo, "session of ", request.worker, " boot ", request.worker_epoch.value(), ", ",
          request.geometry.ToString());
  return reply;
}

absl::StatusOr<RenewReply> StoreNode::Renew(const RenewRequest& request) {
  std::vector<LiveTicket> live;
  live.reserve(request.live.size());
  for (const TicketRef& ticket : request.live) live.push_back(ToLive(ticket));
  MutexLock lock(mu_);
  KVT_RETURN_IF_ERROR(index_.Renew(clock_.Now(), request.session, live));
  return RenewReply{.lease = config_.lease};
}

absl::StatusOr<LookupReply> StoreNode::Lookup(const LookupRequest& request) {
  KVT_RETURN_IF_ERROR(CheckNotDraining());
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<const Ticket> ticket, tickets_.Check(request.ticket));
  std::vector<FoundBlock> found;
  LookupReply reply;
  reply.blocks.resize(request.blocks.size());
  MutexLock lock(mu_);
  KVT_RETURN_IF_ERROR(CheckModel(request.session, *ticket));
  KVT_RETURN_IF_ERROR(
      index_.Lookup(clock_.Now(), request.session, ClaimOf(*ticket), request.blocks, &found));
  for (size_t i = 0; i < found.size(); ++i) {
    LookupReply::Block& block = reply.blocks[i];
    block.presence = found[i].presence;
    SetPlace(found[i], &block.place);
    if (block.presence != BlockPresence::kAbsent) CopyChecksums(found[i].handle, &block.place);
  }
  return reply;
}

void StoreNode::CopyChecksums(uint64_t handle, BlockPlace* place) {
  const auto copy = [&](Plane plane, uint64_t offset, bool on_disk, std::vector<uint64_t>* to) {
    if (offset == kNoOffset && !on_disk) return;
    const absl::Span<const uint64_t> from =
        checksums_.Get(BlockNumberOf(handle), GenerationOfHandle(handle), plane);
    to->assign(from.begin(), from.end());
  };
  copy(Plane::kBase, place->base_offset, place->base_on_disk, &place->base_checksums);
  copy(Plane::kResidual, place->residual_offset, place->residual_on_disk,
       &place->residual_checksums);
}

absl::StatusOr<ReserveReply> StoreNode::Reserve(const ReserveRequest& request) {
  KVT_RETURN_IF_ERROR(CheckNotDraining());
  KVT_ASSIGN_OR_RETURN(const std::shared_ptr<const Ticket> ticket, tickets_.Check(request.ticket));
  std::vector<ReservedBlock> reserved;
  AgedAsk aged;
  {
    const bool may_wait = disk_ != nullptr && request.waited <= absl::ZeroDuration();
    const absl::Time until = clock_.Now() + (may_wait ? config_.spill_wait : absl::ZeroDuration());
    MutexLock lock(mu_);
    for (bool waited = false;; waited = true) {
      const absl::Time now = clock_.Now();
      aged = {.waited = request.waited, .spare_unspilled = now < until && disk_failing_.empty()};
      KVT_RETURN_IF_ERROR(CheckModel(request.session, *ticket));
      const absl::Status status =
          index_.Reserve(now, request.session, ClaimOf(*ticket), request.blocks,
                         request.output_blocks, &reserved, &aged);
      if (status.ok()) break;
      if (!aged.spill_helps) return status;
      // A burst that the disk keeps up with on average costs a moment, not blocks that two used.
      if (!waited) ++spill_waits_;
      spill_work_.NotifyOne();
      spill_done_.WaitFor(mu_, std::min<absl::Duration>(until - now, absl::Milliseconds(50)));
    }
  }
  ReserveReply reply;
  reply.pending = aged.pending;
  reply.blocks.resize(reserved.size());
  for (size_t i = 0; i < reserved.size(); ++i) {
    reply.blocks[i].already_sealed = reserved[i].already_sealed;
    SetPlace(reserved[i], &reply.blocks[i].place);
  }
  return reply;
}

absl::StatusOr<SealReply> StoreNode::Seal(const SealRequest& request) {
  std::vector<SealedBlock> sealed;
  {
    MutexLock lock(mu_);
    KVT_RETURN_IF_ERROR(index_.Seal(clock_.Now(), request.session, ToLive(request.ticket),
                                    request.handles, &sealed));
  }
  SealReply reply;
  reply.blocks.resize(sealed.size());
  for (size_t i = 0; i < sealed.size(); ++i) {
    reply.blocks[i] = SealReply::Block{OutcomeOf(sealed[i].outcome), sealed[i].handle};
  }
  return reply;
}

absl::Status StoreNode::Release(const ReleaseRequest& request) {
  MutexLock lock(mu_);
  return index_.Release(clock_.Now(), request.session, ToLive(request.ticket));
}

absl::Status StoreNode::CloseSession(SessionId session) {
  MutexLock lock(mu_);
  return index_.CloseSession(clock_.Now(), session);
}

}  // namespace kvt
