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
  bool ticket_private = false;  // partial tail, or approximate while its ticket lives
};

enum class BlockPresence : uint8_t { kAbsent = 0, kBaseOnly = 1, kExact = 2 };

}  // namespace kvt
