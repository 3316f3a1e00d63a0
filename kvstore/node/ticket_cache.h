// Checks tickets' signatures and remembers those it has checked: a ticket is presented with every
// lookup and reservation, and checking one costs about a hundred microseconds. Thread-safe.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

// Checked tickets that are remembered: half of these at least, all at most.
inline constexpr size_t kCheckedTicketsMax = 8192;
// Keys that tickets may be signed with: the coordinator's and those before its restarts.
inline constexpr size_t kTicketKeysMax = 4;

class TicketCache {
 public:
  // Adds the coordinator's public key (32 bytes); a known one changes nothing. InvalidArgument.
  absl::Status AddKey(absl::string_view public_key);
  [[nodiscard]] bool HasKey() const;
  // Unavailable before there is a key; Unauthenticated; InvalidArgument (malformed).
  absl::StatusOr<std::shared_ptr<const Ticket>> Check(const SignedTicket& ticket);

 private:
  struct Checked {
    std::string payload;
    std::shared_ptr<const Ticket> ticket;
  };
  using CheckedBySignature = absl::flat_hash_map<std::string, Checked>;
  struct Key {
    std::string bytes;
    std::shared_ptr<const TicketVerifier> verifier;
  };

  void Remember(const std::string& signature, Checked checked) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  std::deque<Key> keys_ ABSL_GUARDED_BY(mu_);  // latest first
  CheckedBySignature recent_ ABSL_GUARDED_BY(mu_);
  CheckedBySignature older_ ABSL_GUARDED_BY(mu_);  // what recent_ was before it was full
};

}  // namespace kvt
