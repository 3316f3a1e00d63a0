#include "coordinator/core/routing.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/limits.h"
#include "kernels/layout/geometry.h"

namespace kvt {
namespace {

// Ready workers of `kind` that serve `model`; FailedPrecondition when there is none.
absl::StatusOr<std::vector<const Member*>> Ready(const Membership& nodes, NodeKind kind,
                                                 absl::string_view model) {
  std::vector<const Member*> ready;
  std::vector<std::string> others;
  for (const auto& [name, member] : nodes.members()) {
    if (member.info.kind != kind || member.info.model.name != model) continue;
    if (member.state == MemberState::kReady) {
      ready.push_back(&member);
    } else {
      others.push_back(absl::StrCat(Describe(member), member.alive() ? " is draining" : " is dead"));
    }
  }
  if (!ready.empty()) return ready;
  return absl::FailedPreconditionError(
      absl::StrCat("no ", NodeKindName(kind), " for model ", model, " is ready",
                   others.empty() ? "" : ": ", absl::StrJoin(others, ", ")));
}

template <typename Cost>
const Member* Cheapest(const std::vector<const Member*>& members, const Cost& cost) {
  return *std::min_element(members.begin(), members.end(), [&](const Member* a, const Member* b) {
    return cost(*a) < cost(*b);  // members are in name order: ties go to the first name
  });
}

}  // namespace

absl::StatusOr<const Member*> PickPrefill(const Membership& nodes, const RequestTable& requests,
                                          absl::string_view model) {
  const auto ready = Ready(nodes, NodeKind::kPrefill, model);
  if (!ready.ok()) return ready.status();
  return Cheapest(*ready, [&](const Member& member) {
    const Debit debit = requests.DebitOf(member.info.name);
    return std::make_tuple(debit.prompt_tokens, debit.tickets);
  });
}

absl::StatusOr<const Member*> PickDecode(const Membership& nodes, const RequestTable& requests,
                                         absl::string_view model,
                                         const std::vector<NodeName>& refused) {
  const auto ready = Ready(nodes, NodeKind::kDecode, model);
  if (!ready.ok()) return ready.status();
  std::vector<const Member*> willing;
  for (const Member* member : *ready) {
    if (std::find(refused.begin(), refused.end(), member->info.name) == refused.end()) {
      willing.push_back(member);
    }
  }
  if (willing.empty()) {
    return absl::ResourceExhaustedError(absl::StrCat("every decode worker for model ", model,
                                                     " refused: ", absl::StrJoin(refused, ", ")));
  }
  return Cheapest(willing, [&](const Member& member) {
    const Debit debit = requests.DebitOf(member.info.name);
    const double share = debit.tickets / static_cast<double>(std::max(1u, member.info.batch_max));
    return std::make_tuple(share, debit.prompt_tokens);
  });
}

absl::Status CheckFitsSomeDecode(const Membership& nodes, const ModelInfo& model,
                                 uint64_t tokens) {
  // The last token's KV is never written.
  const uint64_t blocks = (tokens - 1 + kBlockTokens - 1) / kBlockTokens;
  const uint64_t bytes = blocks * kPlanes * model.geometry.RecordBytes();
  const Member* largest = nullptr;
  for (const auto& [name, member] : nodes.members()) {
    if (member.info.kind != NodeKind::kDecode || member.info.model.name != model.name ||
        !member.alive()) {
      continue;
    }
    if (member.info.capacity_bytes == 0 || member.info.capacity_bytes >= bytes) {
      return absl::OkStatus();
    }
    if (largest == nullptr || member.info.capacity_bytes > largest->info.capacity_bytes) {
      largest = &member;
    }
  }
  if (largest == nullptr) return absl::OkStatus();  // PickDecode says what is missing
  return absl::InvalidArgumentError(absl::StrCat(
      "prompt and output of ", tokens, " tokens need ", bytes, " bytes of slots; the largest decode "
      "worker for ", model.name, ", ", largest->info.name, ", has ", largest->info.capacity_bytes,
      ": ask for less, or give a decode worker more slots_bytes"));
}

}  // namespace kvt
