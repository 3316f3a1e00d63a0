#include "kvstore/node/ticket_cache.h"

#include <utility>
#include <vector>

#include "kernels/base/check.h"

namespace kvt {

absl::Status TicketCache::AddKey(absl::string_view public_key) {
  KVT_ASSIGN_OR_RETURN(std::unique_ptr<TicketVerifier> verifier,
                       TicketVerifier::FromPublicKey(public_key));
  MutexLock lock(mu_);
  for (const Key& key : keys_) {
    if (key.bytes == public_key) return absl::OkStatus();
  }
  keys_.push_front(Key{std::string(public_key), std::move(verifier)});
  if (keys_.size() > kTicketKeysMax) keys_.pop_back();
  return absl::OkStatus();
}

bool TicketCache::HasKey() const {
  MutexLock lock(mu_);
  return !keys_.empty();
}

void TicketCache::Remember(const std::string& signature, Checked checked) {
  if (recent_.size() >= kCheckedTicketsMax / 2) older_ = std::exchange(recent_, {});
  recent_.insert_or_assign(signature, std::move(checked));
}

absl::StatusOr<std::shared_ptr<const Ticket>> TicketCache::Check(const SignedTicket& ticket) {
  std::vector<std::shared_ptr<const TicketVerifier>> verifiers;
  {
    MutexLock lock(mu_);
    for (CheckedBySignature* const checked : {&recent_, &older_}) {
      const auto it = checked->find(ticket.signature);
      if (it == checked->end() || it->second.payload != ticket.payload) continue;
      Checked found = it->second;
      if (checked == &older_) Remember(ticket.signature, found);
      return found.ticket;
    }
    for (const Key& key : keys_) verifiers.push_back(key.verifier);
  }
  if (verifiers.empty()) {
    return absl::UnavailableError(
        "this store cannot check tickets yet: it has not registered with a coordinator");
  }
  absl::Status refusal;
  for (const auto& verifier : verifiers) {
    absl::StatusOr<Ticket> verified = verifier->Verify(ticket);
    if (!verified.ok()) {
      if (refusal.ok()) refusal = verified.status();
      continue;
    }
    auto shared = std::make_shared<const Ticket>(*std::move(verified));
    MutexLock lock(mu_);
    Remember(ticket.signature, Checked{ticket.payload, shared});
    return std::shared_ptr<const Ticket>(std::move(shared));
  }
  return refusal;
}

}  // namespace kvt
