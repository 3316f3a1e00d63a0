#include "coordinator/core/cluster.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "coordinator/core/routing.h"
#include "kernels/base/check.h"
#include "kvstore/wire/fidelity.h"

namespace kvt {
namespace {

// Compares without telling by its duration where the difference is.
bool EqualSecret(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

absl::string_view StateName(MemberState state) {
  switch (state) {
    case MemberState::kReady: return "ready";
    case MemberState::kDraining: return "draining";
    case MemberState::kDead: return "dead";
    case MemberState::kStarting: return "starting";
  }
  return "unknown";
}

std::string RequestCount(int count) {
  return absl::StrCat(count, count == 1 ? " request" : " requests");
}

absl::StatusOr<Fidelity> FidelityOf(const CoordinatorCoreOptions& options,
                                    const AdmitRequest& request) {
  const auto listed = options.tenants.find(request.tenant);
  const TenantOptions& tenant =
      listed == options.tenants.end() ? options.other_tenants : listed->second;
  const Fidelity fidelity = request.fidelity.value_or(tenant.fidelity);
  if (fidelity <= tenant.loosest) return fidelity;
  return absl::PermissionDeniedError(absl::StrCat("fidelity ", FidelityName(fidelity), ": tenant \"",
                                                  request.tenant, "\" permits ",
                                                  FidelityName(tenant.loosest), " at most"));
}

// A permission: a decode worker that cannot offload serves the request resident.
RequestClass ClassOf(const CoordinatorCoreOptions& options, Fidelity fidelity,
                     const AdmitRequest& request) {
  const uint64_t tokens = uint64_t{request.prompt_tokens} + request.output_tokens_max;
  return fidelity == Fidelity::kSparse && request.holder.empty() &&
                 tokens > options.offload_from_tokens
             ? RequestClass::kOffloaded
             : RequestClass::kResident;
}

}  // namespace

absl::Status Cluster::Register(const Moment& now, const RegisterRequest& request) {
  const Member* before = nodes_.Find(request.name);
  const bool known = before != nullptr && before->info.epoch == request.epoch;
  const bool was_dead = known && !before->alive();
  std::vector<Departure> departures;
  const absl::Status status = nodes_.Register(now.monotonic, request, &departures);
  if (!status.ok()) {
    events_.AddUnlessRecent(now.unix, absl::StrCat(request.name, " (pid ", request.pid,
                                                   ") was refused: ", status.message()));
    return status;
  }
  Act(now, departures);
  const Member* member = nodes_.Find(request.name);
  if (!known) {
    events_.Add(now.unix, absl::StrCat(NodeKindName(request.kind), " ", Describe(*member),
                                       " joined at ", request.control_address,
                                       member->state == MemberState::kStarting
                                           ? ", starting" : ""));
  } else if (was_dead) {
    events_.Add(now.unix, absl::StrCat(Describe(*member), " came back"));
  }
  return absl::OkStatus();
}

HeartbeatReply Cluster::Heartbeat(const Moment& now, const HeartbeatRequest& request) {
  HeartbeatReply reply;
  const Member* before = nodes_.Find(request.name);
  const bool was_starting = before != nullptr && before->state == MemberState::kStarting;
  const std::string condition_before = before == nullptr ? "" : before->load.condition;
  const bool was_draining = before != nullptr && before->state == MemberState::kDraining;
  const Member* member = nodes_.Heartbeat(now.monotonic, request);
  if (was_starting && member != nullptr && member->state == MemberState::kReady) {
    events_.Add(now.unix, absl::StrCat(Describe(*member), " is ready"));
  }
  if (member == nullptr) {
    reply.unknown = true;
    return reply;
  }
  if (request.load.draining && !was_draining) {
    events_.Add(now.unix, absl::StrCat(Describe(*member), " is stopping and drains"));
  }
  const std::string& condition = member->load.condition;
  if (condition.empty() != condition_before.empty()) {
    events_.Add(now.unix,
                absl::StrCat(Describe(*member), ": ",
                             condition.empty() ? "well again"
                                               : condition.substr(0, kErrorBytesMax)));
  }
  requests_.Seen(now.monotonic, request.name, request.load.tickets);
  if (request.view_version != nodes_.view_version()) reply.view = nodes_.View();
  reply.drain = member->state == MemberState::kDraining;
  reply.cancelled = requests_.EndedFor(now.monotonic, request.name, request.load.tickets);
  return reply;
}

absl::Status Cluster::Leave(const Moment& now, const NodeName& name, BootEpoch epoch) {
  std::vector<Departure> departures;
  KVT_RETURN_IF_ERROR(nodes_.Leave(name, epoch, &departures));
  Act(now, departures);
  return absl::OkStatus();
}

absl::Status Cluster::SetDraining(const Moment& now, const NodeName& name, bool draining) {
  KVT_RETURN_IF_ERROR(nodes_.SetDraining(name, draining));
  events_.Add(now.unix, absl::StrCat(name, draining ? " is draining" : " is ready again"));
  return absl::OkStatus();
}

void Cluster::Act(const Moment& now, const std::vector<Departure>& departures) {
  for (const Departure& gone : departures) {
    const bool died = gone.cause != "left";
    int failed = 0;
    if (gone.kind != NodeKind::kStore) {
      failed = requests_.WorkerGone(now.monotonic, gone.name,
                                    absl::StrCat(NodeKindName(gone.kind), " ", gone.description,
                                                 died ? " died: " : ": ", gone.cause));
    }
    std::string text = absl::StrCat(gone.description, died ? " declared dead: " : " ", gone.cause);
    if (failed > 0) absl::StrAppend(&text, "; ", RequestCount(failed), " failed");
    events_.Add(now.unix, text);
  }
}

absl::StatusOr<ModelInfo> Cluster::ModelOf(const AdmitRequest& request) const {
  if (!request.holder.empty()) {
    const Member* holder = nodes_.Find(request.holder);
    if (holder == nullptr || holder->info.kind != NodeKind::kClient ||
        holder->state != MemberState::kReady) {
      return absl::FailedPreconditionError(absl::StrCat(
          "holder ", request.holder, ": ",
          holder == nullptr || holder->info.kind != NodeKind::kClient
              ? "no client of that name is registered"
              : StateName(holder->state)));
    }
    if (holder->info.model.name != request.model) {
      return absl::InvalidArgumentError(absl::StrCat("holder ", request.holder, " has model ",
                                                     holder->info.model.name, ", not ",
                                                     request.model));
    }
    return holder->info.model;
  }
  const std::vector<ModelInfo> models = Models();
  const auto found = std::find_if(models.begin(), models.end(), [&](const ModelInfo& candidate) {
    return candidate.name == request.model;
  });
  if (found == models.end()) {
    // A model whose workers all died is a dead worker, not an unknown name.
    for (const auto& [name, member] : nodes_.members()) {
      if (member.info.model.name == request.model && !request.model.empty()) {
        return PickPrefill(nodes_, requests_, request.model).status();
      }
    }
    if (models.empty()) {
      return absl::FailedPreconditionError(
          "no prefill worker and no decode worker is ready, so no model is served");
    }
    const std::string names = absl::StrJoin(
        models, ", ", [](std::string* out, const ModelInfo& m) { absl::StrAppend(out, m.name); });
    return absl::NotFoundError(
        absl::StrCat("model ", request.model, " is not served here; known: ", names));
  }
  return *found;
}

absl::StatusOr<Fidelity> Cluster::CheckAdmission(const AdmitRequest& request,
                                                 ModelInfo* model) const {
  KVT_ASSIGN_OR_RETURN(*model, ModelOf(request));
  if (request.prompt_tokens == 0) return absl::InvalidArgumentError("the prompt is empty");
  if (request.output_tokens_max == 0) {
    return absl::InvalidArgumentError("output_tokens_max: 0 tokens were asked for");
  }
  if (request.tenant.size() > kTenantBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("tenant: longer than ", kTenantBytesMax, " bytes"));
  }
  const uint64_t context = model->context_tokens_max;
  if (request.prompt_tokens >= context) {
    return absl::InvalidArgumentError(absl::StrCat("the prompt has ", request.prompt_tokens,
                                                   " tokens, beyond the context of ", model->name,
                                                   ", ", context, " tokens"));
  }
  if (request.output_tokens_max > context - request.prompt_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "output_tokens_max: ", request.output_tokens_max, " after a prompt of ",
        request.prompt_tokens, " is beyond the context of ", model->name, ", ", context, " tokens"));
  }
  return FidelityOf(options_, request);
}

absl::StatusOr<Grant> Cluster::Admit(const Moment& now, const AdmitRequest& request,
                                     std::string capability) {
  const auto refuse = [&](const absl::Status& status) {
    requests_.CountRefused();
    return status;
  };
  ModelInfo model;
  const absl::StatusOr<Fidelity> fidelity = CheckAdmission(request, &model);
  if (!fidelity.ok()) return refuse(fidelity.status());
  absl::StatusOr<const Member*> holder = nodes_.Find(request.holder);
  if (request.holder.empty()) {
    holder = PickPrefill(nodes_, requests_, request.model);
    if (!holder.ok()) return refuse(holder.status());
    const auto decode = PickDecode(nodes_, requests_, request.model, {});
    if (!decode.ok()) return refuse(decode.status());
    const absl::Status fits = CheckFitsSomeDecode(
        nodes_, model, uint64_t{request.prompt_tokens} + request.output_tokens_max);
    if (!fits.ok()) return refuse(fits);
  }
  ClusterView view = nodes_.View();
  if (view.stores.empty() && !request.holder.empty()) {
    return refuse(absl::FailedPreconditionError("no store is ready"));
  }
  if (requests_.counts().running >= static_cast<uint64_t>(options_.request_limit)) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat(requests_.counts().running, " requests are running, the limit is ",
                     options_.request_limit, "; try again")));
  }
  Ticket ticket;
  ticket.id = requests_.NextId();
  ticket.epoch = TicketEpoch(1);
  ticket.tenant = request.tenant;
  ticket.model = model.name;
  ticket.model_fingerprint = model.fingerprint;
  ticket.numerics_id = model.numerics_id;
  ticket.prompt_tokens = request.prompt_tokens;
  ticket.output_tokens_max = request.output_tokens_max;
  ticket.fidelity = *fidelity;
  // The offloaded class lives on the tier.
  ticket.request_class = view.stores.empty() ? RequestClass::kResident
                                             : ClassOf(options_, *fidelity, request);
  ticket.prefill_worker = (*holder)->info.name;
  ticket.stores = std::move(view.stores);
  ticket.capability = std::move(capability);
  ticket.present_by_unix_ms = absl::ToUnixMillis(now.unix + options_.present_within);
  NoteTier(now, !ticket.stores.empty());
  requests_.Insert(now.monotonic, ticket, RequestPhase::kAdmitted);
  return Grant{std::move(ticket), (*holder)->info.control_address};
}

void Cluster::NoteTier(const Moment& now, bool stores) {
  if (stores == has_tier_) return;
  has_tier_ = stores;
  events_.Add(now.unix, stores ? "stores are ready: requests use the tier again"
                               : "no store is ready: requests are served without the tier, and "
                                 "each prompt is computed twice");
}

absl::StatusOr<RequestRecord*> Cluster::FindOrAdopt(const Moment& now, const Ticket& ticket,
                                                    RequestPhase phase) {
  RequestRecord* record = requests_.Find(ticket.id);
  const std::string id = FormatTicketId(ticket.id);
  if (record == nullptr) {
    if (requests_.IsForgotten(ticket.id)) {
      return absl::FailedPreconditionError(absl::StrCat("request ", id, " is over"));
    }
    if (requests_.counts().running >= static_cast<uint64_t>(options_.request_limit)) {
      return absl::ResourceExhaustedError("too many requests are running; try again");
    }
    return &requests_.Insert(now.monotonic, ticket, phase);
  }
  if (IsFinal(record->phase)) {
    return absl::FailedPreconditionError(
        absl::StrCat("request ", id, " is over: ", RequestPhaseName(record->phase),
                     record->error.empty() ? "" : ": ", record->error));
  }
  return record;
}

absl::StatusOr<Grant> Cluster::Place(const Moment& now, const Ticket& ticket,
                                     const std::vector<NodeName>& refused_by) {
  KVT_ASSIGN_OR_RETURN(RequestRecord * record, FindOrAdopt(now, ticket, RequestPhase::kPrefill));
  if (ticket.epoch != record->ticket.epoch) {
    return absl::FailedPreconditionError(
        absl::StrCat("request ", FormatTicketId(ticket.id), ": epoch ", ticket.epoch.value(),
                     " is fenced by epoch ", record->ticket.epoch.value()));
  }
  if (record->phase == RequestPhase::kDecode) {
    return absl::FailedPreconditionError(absl::StrCat("request ", FormatTicketId(ticket.id),
                                                      " decodes on ",
                                                      record->ticket.decode_worker, " already"));
  }
  KVT_ASSIGN_OR_RETURN(const Member* decode,
                       PickDecode(nodes_, requests_, record->ticket.model, refused_by));
  // The one that could hold it may have gone since it was admitted.
  KVT_RETURN_IF_ERROR(CheckFitsSomeDecode(
      nodes_, decode->info.model,
      uint64_t{record->ticket.prompt_tokens} + record->ticket.output_tokens_max));
  Ticket placed = record->ticket;
  placed.decode_worker = decode->info.name;
  placed.decode_address = decode->info.control_address;
  placed.present_by_unix_ms = absl::ToUnixMillis(now.unix + options_.present_within);
  requests_.Grant(now.monotonic, *record, placed, RequestPhase::kHandOver);
  return Grant{std::move(placed), decode->info.control_address};
}

absl::StatusOr<Grant> Cluster::Regrant(const Moment& now, const Ticket& ticket,
                                       const std::string& reason) {
  KVT_ASSIGN_OR_RETURN(RequestRecord * record, FindOrAdopt(now, ticket, RequestPhase::kDecode));
  // The reply to an earlier call was lost: the same grant again.
  const bool repeated = record->regranted_from == ticket.epoch &&
                        record->ticket.epoch.value() == ticket.epoch.value() + 1;
  if (ticket.epoch != record->ticket.epoch && !repeated) {
    return absl::FailedPreconditionError(
        absl::StrCat("request ", FormatTicketId(ticket.id), ": epoch ", ticket.epoch.value(),
                     " is fenced by epoch ", record->ticket.epoch.value()));
  }
  const Member* decode = nodes_.Find(record->ticket.decode_worker);
  if (decode == nullptr || !decode->alive()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "request ", FormatTicketId(ticket.id), " has no decode worker that is alive"));
  }
  KVT_ASSIGN_OR_RETURN(const Member* prefill,
                       PickPrefill(nodes_, requests_, record->ticket.model));
  ClusterView view = nodes_.View();
  // The decode worker computes what it lacks itself rather than through a tier that is not there.
  if (view.stores.empty()) return absl::UnavailableError("no store is ready");
  Ticket granted = record->ticket;
  if (!repeated) {
    record->regranted_from = ticket.epoch;
    granted.epoch = TicketEpoch(ticket.epoch.value() + 1);
    events_.Add(now.unix, absl::StrCat("request ", FormatTicketId(ticket.id),
                                       " goes back to prefill: ",
                                       absl::string_view(reason).substr(0, kErrorBytesMax)));
  }
  granted.prefill_worker = prefill->info.name;
  granted.stores = std::move(view.stores);
  granted.present_by_unix_ms = absl::ToUnixMillis(now.unix + options_.present_within);
  requests_.Grant(now.monotonic, *record, granted, RequestPhase::kPrefill);
  return Grant{std::move(granted), prefill->info.control_address};
}

absl::Status Cluster::Cancel(const Moment& now, TicketId id, const std::string& capability) {
  RequestRecord* record = requests_.Find(id);
  if (record == nullptr) {
    return absl::NotFoundError(absl::StrCat("request ", FormatTicketId(id), " is unknown"));
  }
  if (!EqualSecret(record->ticket.capability, capability)) {
    return absl::PermissionDeniedError(
        absl::StrCat("request ", FormatTicketId(id), ": wrong capability"));
  }
  if (!IsFinal(record->phase)) {
    requests_.End(now.monotonic, *record, RequestPhase::kCancelled, "");
  }
  return absl::OkStatus();
}

void Cluster::Update(const Moment& now, const std::vector<TicketUpdate>& updates) {
  for (const TicketUpdate& update : updates) requests_.Update(now.monotonic, update);
}

void Cluster::Tick(const Moment& now) {
  const absl::Duration gap = now.monotonic - last_tick_;
  if (gap >= kStallFrom) {
    nodes_.Extend(gap);
    requests_.Extend(gap);
    events_.Add(now.unix, absl::StrFormat("the coordinator itself stalled for %.1f s",
                                          absl::ToDoubleSeconds(gap)));
  }
  last_tick_ = now.monotonic;
  std::vector<Departure> departures;
  nodes_.Tick(now.monotonic, &departures);
  Act(now, departures);
  for (const TicketId id : requests_.Tick(now.monotonic)) {
    events_.Add(now.unix, absl::StrCat("request ", FormatTicketId(id),
                                       " failed: ", requests_.Find(id)->error));
  }
}

ClusterStatus Cluster::Status(const Moment& now) const {
  ClusterStatus status;
  status.view_version = nodes_.view_version();
  for (const NodeKind kind :
       {NodeKind::kStore, NodeKind::kPrefill, NodeKind::kDecode, NodeKind::kClient}) {
    for (const auto& [name, member] : nodes_.members()) {
      if (member.info.kind != kind) continue;
      NodeStatus node;
      node.kind = kind;
      node.name = name;
      node.epoch = member.info.epoch;
      node.control_address = member.info.control_address;
      node.pid = member.info.pid;
      node.state = std::string(StateName(member.state));
      node.since_heartbeat = now.monotonic - member.last_heard;
      node.model = member.info.model;
      node.capacity_bytes = member.info.capacity_bytes;
      node.load = member.load;
      node.load.tickets.clear();  // `requests` shows them
      status.nodes.push_back(std::move(node));
    }
  }
  const RequestCounts& counts = requests_.counts();
  status.admitted = counts.admitted;
  status.running = counts.running;
  status.done = counts.done;
  status.failed = counts.failed;
  status.cancelled = counts.cancelled;
  status.refused = counts.refused;
  status.events = events_.All();
  return status;
}

std::vector<ModelInfo> Cluster::Models() const {
  std::map<std::string, ModelInfo> models;
  for (const auto& [name, member] : nodes_.members()) {
    if (!member.alive()) continue;
    if (member.info.kind != NodeKind::kPrefill && member.info.kind != NodeKind::kDecode) continue;
    const ModelInfo& model = member.info.model;
    const auto [it, fresh] = models.try_emplace(model.name, model);
    it->second.context_tokens_max =
        std::min(it->second.context_tokens_max, model.context_tokens_max);
  }
  std::vector<ModelInfo> out;
  for (auto& [name, model] : models) out.push_back(std::move(model));
  return out;
}

}  // namespace kvt
