// What moves between a store's media and what its disk may hold: BlockIndex's book of it. Values
// only; BlockIndex (block_index_spill.cc) keeps them right.
#pragma once

#include <cstdint>
#include <deque>

#include "absl/container/flat_hash_map.h"
#include "kvstore/index/eviction_plan.h"
#include "kvstore/index/index_types.h"

namespace kvt {

struct DiskMoves {
  bool writable = false;
  bool pressed = false;        // between the watermarks, coming from the high one
  uint64_t awaited_bytes = 0;  // a reservation waits for so much; it asks again after each round
  RoomNeed starved;  // what was refused last; its class's pinned records are spilled for it
  uint64_t limit_bytes = 0;  // of records on disk, below what the options say; 0: none
  absl::flat_hash_map<uint64_t, bool> spilling;      // record handle -> leaves memory when written
  uint64_t spilling_bytes = 0;
  uint64_t leaving_bytes = 0;  // of those, what leaves
  absl::flat_hash_map<uint32_t, uint64_t> domain_spilling;  // bytes by domain
  absl::flat_hash_map<uint64_t, uint64_t> landings;         // record handle -> offset
  std::deque<DiskErasure> erasures;                         // oldest first
};

}  // namespace kvt
