// One Lookup over the stores: whom each group of blocks asks, in which order, and the joining of the
// answers. Rounds: first the owners in the ticket's placement, all at once; then, for groups with
// absent blocks, the owner in the client's current view and the one in its previous view, where that
// is another store; then, with LookupReach::kEveryStore, all others of those views at once. A store that
// is down or does not answer is replaced by the next in order.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/client/link_table.h"
#include "kvstore/client/tier_types.h"

namespace kvt {

// Stores of one view in order of preference for a key: see placement.h.
struct LookupPlacements {
  std::vector<StoreRef> ticket;    // the ticket's own
  std::vector<StoreRef> current;   // the client's view
  std::vector<StoreRef> previous;  // the view before it
};

// The numbers of `stores` in the table, kNoStore where it is full.
std::vector<uint32_t> NumberStores(LinkTable& links, absl::Span<const StoreRef> stores);

// Blocks until every store asked has answered or `deadline` (RealClock). Thread-safe.
LookupResult LookupInTier(LinkTable& links, CallPool& calls, const Geometry& geometry,
                          const LookupPlacements& placements, const HeldTicket& ticket,
                          absl::Span<const TierBlock> blocks, LookupReach reach,
                          absl::Time deadline);

}  // namespace kvt
