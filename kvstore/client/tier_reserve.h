// One Reserve over the stores (DESIGN 3, Room): who is asked for what, in order of store name, all
// or nothing on request, a dead store's share going to the next in order.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/client/link_table.h"
#include "kvstore/client/tier_types.h"

namespace kvt {

// Blocks up to the stores' control timeouts. Errors as TierClient::Reserve. Thread-safe.
absl::StatusOr<ReserveResult> ReserveInTier(LinkTable& links, const HeldTicket& ticket,
                                            absl::Span<const TierBlock> blocks,
                                            uint32_t output_blocks, const ReserveTerms& terms,
                                            absl::Duration control_timeout);

// Lets go of everything of the ticket, now, in every store but those of these numbers.
void LetGo(LinkTable& links, TicketRef ticket, absl::Span<const uint32_t> except = {});

}  // namespace kvt
