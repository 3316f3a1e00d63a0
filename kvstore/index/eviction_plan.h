// What has to leave memory so that so much fits. Decides only; evicts nothing. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "kvstore/index/block_table.h"
#include "kvstore/index/eviction_order.h"
#include "kvstore/index/record_allocator.h"

namespace kvt {

struct RoomNeed {
  RecordAllocator::ClassId cls = 0;
  uint64_t records = 0;
  uint64_t blocks = 0;  // block numbers
  // Worth a pinned BASE, which somebody reads at every step.
  bool pinned_base = true;
};

struct EvictionRules {
  // RESIDUAL records of cold blocks go before their BASE, which pays when they can come back from
  // disk. Otherwise both planes of the coldest block go together: a BASE alone is of use to elastic
  // tickets only. Those of a digest always go together.
  bool planes_apart = false;
  // The disk takes writes: what deserves to be there is spared while something else can go.
  bool disk = false;
  bool spill_one_time = false;
  bool spare_unspilled = false;  // what deserves to be on disk and is not there does not go
  bool floors = true;  // classes below their floor first take slabs of others: looks at all records
  absl::Time now;
};

// Bytes of digests beyond their share of `limit`; 0: no limit. They go before KV.
[[nodiscard]] uint64_t DigestExcess(uint64_t digest_bytes, uint64_t limit);

// A block is worth writing to disk.
[[nodiscard]] inline bool DeservesDisk(const Block& block, const EvictionRules& rules) {
  return rules.disk && !block.purged && (block.reused || rules.spill_one_time);
}
// The plane's memory may be given up now: it is on disk, or unheld. Precondition: sealed.
[[nodiscard]] bool MayLeave(const Block& block, Plane plane);

struct EvictionSet {
  // Record handles, in this order: of each the memory alone when it is on disk; else the record is
  // lost, and with a BASE its block.
  std::vector<uint64_t> records;
  std::vector<uint32_t> blocks;  // to be evicted whole, from both media
  bool floor_missed = false;     // there were not the slabs that its floor grants
};

// Digests (digest_geometry.h) outlast KV, so that what is left of a sequence, or comes back from disk,
// can be selected from without reading all its planes:
//   - slabs of digests are given to KV when there is nothing else, but
//   - once something has to leave, digests in more slabs than their share (kDigestSharePart) are what
//     leaves, coldest first: so those whose KV is long gone end;
//   - digests below their share take slabs of KV before their own cold ones go; at it they never do.
// What to give up; empty when there is room now. In this order, coldest first:
//   1. of unheld blocks, what is on disk too and what does not deserve to be;
//   2. of unheld blocks, the rest (not with spare_unspilled);
//   3. of pinned blocks, what is on disk too, RESIDUAL first, then BASE if it is worth that; not what
//      was promoted lately;
//   4. whole slabs of other classes, those first whose warmest record is coldest.
// 4 comes first for a class below its floor (kClassFloorPart), up to that and of classes above it.
// Within 1 and 2: blocks used once before others, RESIDUAL before BASE (see planes_apart).
// Block numbers: of KV before digests, unless those have more than their share (kDigestNumbersPart).
// Nothing when there is no such set: then the caller refuses, and evicts nothing.
[[nodiscard]] std::optional<EvictionSet> PlanEviction(const BlockTable& table,
                                                      const EvictionOrder& order,
                                                      const RecordAllocator& allocator,
                                                      const RoomNeed& need,
                                                      const EvictionRules& rules);

}  // namespace kvt
