// What identifies a block: its key, and what must match on a hit; and what a lookup answers.
#pragma once

#include <cstdint>
#include <vector>

#include "kvstore/index/block_key.h"

namespace kvt {

struct BlockName {
  BlockKey key;
  BlockKey parent;
  std::vector<int32_t> tokens;  // 16, or fewer for a private tail; compared on a hit
  Provenance provenance = Provenance::kExact;
  // A partial tail: its key holds the ticket, and nobody else ever finds it. (An approximate block is
  // its ticket's alone too, until the ticket ends: the store sees to that, its name is as any other.)
  bool ticket_private = false;
};

enum class BlockPresence : uint8_t { kAbsent = 0, kBaseOnly = 1, kExact = 2 };

}  // namespace kvt
