// Strong identifiers: two kinds of id do not convert into each other.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvt {

template <typename Tag, typename Rep = uint64_t>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep value) : value_(value) {}
  constexpr Rep value() const { return value_; }
  friend constexpr auto operator<=>(StrongId, StrongId) = default;
  template <typename H>
  friend H AbslHashValue(H h, StrongId id) {
    return H::combine(std::move(h), id.value_);
  }
  friend std::ostream& operator<<(std::ostream& os, StrongId id) { return os << id.value_; }

 private:
  Rep value_ = 0;
};

// A request's grant. Unique for the life of a cluster (the coordinator's boot epoch is in its upper
// 24 bits). Zero is no ticket.
using TicketId = StrongId<struct TicketTag>;
// Raised by every re-grant of a ticket; a higher epoch fences the lower one at each store.
using TicketEpoch = StrongId<struct TicketEpochTag, uint32_t>;
// A lease of one worker boot at one store. Zero is no session.
using SessionId = StrongId<struct SessionTag>;
// A node's boot: a restart is a new epoch and its old handles are dead.
using BootEpoch = StrongId<struct BootEpochTag>;

// A node's name as given in its configuration, unique in the cluster ("store-0").
using NodeName = std::string;

}  // namespace kvt
