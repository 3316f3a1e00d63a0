#include "kvstore/client/ticket_gate.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {

TicketGate::TicketGate(NodeKind kind, NodeName node, ModelInfo model)
    : kind_(kind), node_(std::move(node)), model_(std::move(model)) {
  KVT_CHECK(kind != NodeKind::kStore);
}

absl::Status TicketGate::SetKey(absl::string_view raw32) {
  KVT_ASSIGN_OR_RETURN(std::shared_ptr<const TicketVerifier> verifier,
                       TicketVerifier::FromPublicKey(raw32));
  MutexLock lock(mu_);
  verifier_ = std::move(verifier);
  return absl::OkStatus();
}

absl::StatusOr<Ticket> TicketGate::Verify(const SignedTicket& ticket) const {
  std::shared_ptr<const TicketVerifier> verifier;
  {
    MutexLock lock(mu_);
    verifier = verifier_;
  }
  if (verifier == nullptr) {
    return absl::UnavailableError(absl::StrCat(node_, " has not joined its cluster yet"));
  }
  return verifier->Verify(ticket);
}

absl::StatusOr<HeldTicket> TicketGate::Check(const SignedTicket& signed_ticket,
                                             absl::Time wall_now) const {
  KVT_ASSIGN_OR_RETURN(Ticket ticket, Verify(signed_ticket));
  const NodeName& holder =
      kind_ == NodeKind::kDecode ? ticket.decode_worker : ticket.prefill_worker;
  if (holder != node_) {
    return absl::FailedPreconditionError(
        absl::StrCat("the ticket is for \"", holder, "\", this is \"", node_, "\""));
  }
  if (ticket.model != model_.name || ticket.model_fingerprint != model_.fingerprint) {
    return absl::FailedPreconditionError(
        absl::StrCat("the ticket is for model ", ticket.model, " (", ticket.model_fingerprint,
                     "), ", node_, " serves ", model_.name, " (", model_.fingerprint, ")"));
  }
  if (ticket.numerics_id != model_.numerics_id) {
    return absl::FailedPreconditionError(absl::StrCat("the ticket is for numerics ",
                                                      ticket.numerics_id, ", ", node_, " has ",
                                                      model_.numerics_id));
  }
  if (absl::ToUnixMillis(wall_now) > ticket.present_by_unix_ms) {
    return absl::DeadlineExceededError("the ticket was not presented in time: ask for another");
  }
  return HeldTicket{signed_ticket, std::move(ticket)};
}

}  // namespace kvt
