#include "coordinator/core/membership.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "kernels/base/limits.h"
#include "kvstore/wire/version.h"

namespace kvt {
namespace {

absl::Status Malformed(absl::string_view field, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("register: ", field, ": ", why));
}

bool IsPrintable(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return absl::ascii_isgraph(c); });
}

absl::Status CheckName(absl::string_view name) {
  const bool good = !name.empty() && name.size() <= kNodeNameBytesMax &&
                    std::all_of(name.begin(), name.end(), [](char c) {
                      return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.';
                    });
  return good ? absl::OkStatus()
              : Malformed("name", "expected 1 to 64 letters, digits, '-', '_' or '.'");
}

absl::Status CheckShape(const RegisterRequest& request) {
  KVT_RETURN_IF_ERROR(CheckName(request.name));
  if (request.epoch == BootEpoch()) return Malformed("epoch", "zero is no boot");
  const std::string& address = request.control_address;
  const bool client = request.kind == NodeKind::kClient;
  if ((address.empty() && !client) || address.size() > kAddressBytesMax || !IsPrintable(address)) {
    return Malformed("control_address", "expected \"host:port\"");
  }
  if (!CommonWireVersion(request.versions, WireVersionRange{})) {
    return absl::FailedPreconditionError(
        absl::StrCat(request.name, " speaks wire versions ", request.versions.min, " to ",
                     request.versions.max, ", this coordinator ", kWireVersionMin, " to ",
                     kWireVersion));
  }
  if (request.kind == NodeKind::kStore) return absl::OkStatus();
  const ModelInfo& model = request.model;
  if (model.name.empty() || model.name.size() > kTenantBytesMax || !IsPrintable(model.name)) {
    return Malformed("model.name", "expected 1 to 128 printable characters without spaces");
  }
  if (model.fingerprint.empty() || model.fingerprint.size() > kTenantBytesMax) {
    return Malformed("model.fingerprint", "expected 1 to 128 characters");
  }
  if (model.numerics_id.empty() || model.numerics_id.size() > kAddressBytesMax) {
    return Malformed("model.numerics_id", "expected 1 to 256 characters");
  }
  KVT_RETURN_IF_ERROR(model.geometry.Validate());
  if (model.context_tokens_max == 0 || model.context_tokens_max > kSequenceTokensMax) {
    return Malformed("model.context_tokens_max",
                     absl::StrCat(model.context_tokens_max, " is outside [1, ",
                                  kSequenceTokensMax, "]"));
  }
  return absl::OkStatus();
}

std::string ModelSide(const RegisterRequest& side) {
  return absl::StrCat(side.name, " (fingerprint ", side.model.fingerprint, ", geometry ",
                      side.model.geometry.ToString(), ", numerics ", side.model.numerics_id, ")");
}

Departure Depart(const Member& member, absl::string_view cause) {
  return Departure{.name = member.info.name,
                   .kind = member.info.kind,
                   .description = Describe(member),
                   .cause = std::string(cause)};
}

bool InView(const Member& member) {
  return member.info.kind == NodeKind::kStore && member.state == MemberState::kReady;
}

}  // namespace

std::string Describe(const Member& member) {
  return absl::StrCat(member.info.name, " (pid ", member.info.pid, ")");
}

absl::string_view NodeKindName(NodeKind kind) {
  switch (kind) {
    case NodeKind::kStore: return "store";
    case NodeKind::kPrefill: return "prefill worker";
    case NodeKind::kDecode: return "decode worker";
    case NodeKind::kClient: return "client";
  }
  return "node";
}

absl::Status Membership::CheckModel(const RegisterRequest& request) const {
  if (request.kind == NodeKind::kStore) return absl::OkStatus();
  for (const auto& [name, member] : members_) {
    const ModelInfo& other = member.info.model;
    if (!member.alive() || member.info.kind == NodeKind::kStore || name == request.name ||
        other.name != request.model.name) {
      continue;
    }
    if (other.fingerprint == request.model.fingerprint &&
        other.geometry == request.model.geometry &&
        other.numerics_id == request.model.numerics_id) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat("model ", other.name, ": ",
                                                      ModelSide(request), " does not match ",
                                                      ModelSide(member.info)));
  }
  return absl::OkStatus();
}

absl::Status Membership::Register(absl::Time now, const RegisterRequest& request,
                                  std::vector<Departure>* departures) {
  KVT_RETURN_IF_ERROR(CheckShape(request));
  KVT_RETURN_IF_ERROR(CheckModel(request));
  auto found = members_.find(request.name);
  BootEpoch superseded;
  if (found != members_.end()) {
    Member& member = found->second;
    const bool same_boot = member.info.epoch == request.epoch;
    if (member.superseded == request.epoch) {
      return absl::FailedPreconditionError(
          absl::StrCat("the name ", request.name, " was taken over by a later boot, pid ",
                       member.info.pid, " at ", member.info.control_address));
    }
    if (member.alive() && member.info.kind != request.kind) {
      return absl::AlreadyExistsError(absl::StrCat("the name ", request.name, " belongs to a ",
                                                   NodeKindName(member.info.kind), ", pid ",
                                                   member.info.pid));
    }
    if (!same_boot && member.alive()) {
      departures->push_back(Depart(member, "restarted"));
    }
    superseded = same_boot ? member.superseded : member.info.epoch;
    if (InView(member)) ++view_version_;
  } else {
    if (members_.size() >= kNodesMax) ForgetOldestDead();
    if (members_.size() >= kNodesMax) {
      return absl::ResourceExhaustedError(absl::StrCat("the cluster has ", kNodesMax, " nodes"));
    }
  }
  // Draining and being ready outlive a repeated registration of the same boot.
  MemberState state = request.starting ? MemberState::kStarting : MemberState::kReady;
  if (found != members_.end() && found->second.info.epoch == request.epoch &&
      found->second.alive()) {
    state = found->second.state;
  }
  Member& member = members_[request.name];
  member = Member{.info = request,
                  .state = state,
                  .last_heard = now,
                  .died = absl::InfinitePast(),
                  .load = {},
                  .superseded = superseded};
  if (InView(member)) ++view_version_;
  return absl::OkStatus();
}

const Member* Membership::Heartbeat(absl::Time now, const HeartbeatRequest& request) {
  const auto found = members_.find(request.name);
  if (found == members_.end() || !found->second.alive() ||
      found->second.info.epoch != request.epoch) {
    return nullptr;
  }
  found->second.last_heard = now;
  found->second.load = request.load;
  if (found->second.state == MemberState::kStarting && !request.load.starting) {
    found->second.state = MemberState::kReady;
    if (InView(found->second)) ++view_version_;
  }
  if (found->second.state != MemberState::kDraining && request.load.draining) {
    if (InView(found->second)) ++view_version_;
    found->second.state = MemberState::kDraining;
  }
  return &found->second;
}

absl::Status Membership::Leave(const NodeName& name, BootEpoch epoch,
                               std::vector<Departure>* departures) {
  const auto found = members_.find(name);
  if (found == members_.end() || found->second.info.epoch != epoch) {
    return absl::NotFoundError(absl::StrCat("leave: ", name, " of this boot is not a member"));
  }
  if (found->second.alive()) departures->push_back(Depart(found->second, "left"));
  if (InView(found->second)) ++view_version_;
  members_.erase(found);
  return absl::OkStatus();
}

absl::Status Membership::SetDraining(const NodeName& name, bool draining) {
  const auto found = members_.find(name);
  if (found == members_.end() || !found->second.alive()) {
    return absl::NotFoundError(absl::StrCat("drain: no node ", name, " is alive"));
  }
  const bool before = InView(found->second);
  const MemberState undrained =
      found->second.load.starting ? MemberState::kStarting : MemberState::kReady;
  found->second.state = draining ? MemberState::kDraining : undrained;
  if (InView(found->second) != before) ++view_version_;
  return absl::OkStatus();
}

void Membership::Tick(absl::Time now, std::vector<Departure>* departures) {
  for (auto& [name, member] : members_) {
    const absl::Duration silence = now - member.last_heard;
    if (!member.alive() || silence < options_.death_after) continue;
    if (InView(member)) ++view_version_;
    departures->push_back(Depart(
        member, absl::StrFormat("no heartbeat for %.1f s", absl::ToDoubleSeconds(silence))));
    member.state = MemberState::kDead;
    member.died = now;
    member.load = {};
  }
  size_t dead = 0;
  for (const auto& [name, member] : members_) dead += member.alive() ? 0 : 1;
  for (; dead > kDeadNodesMax; --dead) ForgetOldestDead();
}

void Membership::Extend(absl::Duration stall) {
  for (auto& [name, member] : members_) {
    if (member.alive()) member.last_heard += stall;
  }
}

void Membership::ForgetOldestDead() {
  auto oldest = members_.end();
  for (auto it = members_.begin(); it != members_.end(); ++it) {
    if (it->second.alive()) continue;
    if (oldest == members_.end() || it->second.died < oldest->second.died) oldest = it;
  }
  if (oldest != members_.end()) members_.erase(oldest);
}

const Member* Membership::Find(const NodeName& name) const {
  const auto found = members_.find(name);
  return found == members_.end() ? nullptr : &found->second;
}

ClusterView Membership::View() const {
  ClusterView view{.version = view_version_, .stores = {}};
  for (const auto& [name, member] : members_) {
    if (!InView(member)) continue;
    view.stores.push_back(StoreRef{.name = name,
                                   .epoch = member.info.epoch,
                                   .control_address = member.info.control_address,
                                   .weight = 1});
  }
  return view;
}

}  // namespace kvt
