#include "kvstore/index/eviction_plan.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "kernels/base/units.h"

namespace kvt {
namespace {

struct SlabUse {
  uint32_t evictable = 0;  // records
  uint64_t warmth = 0;     // position of its warmest block in the order
};

// Blocks of other classes whose eviction empties `slabs` slabs; false when there are not so many.
bool TakeSlabsOfOthers(const BlockTable& table, const EvictionOrder& order,
                       const RecordAllocator& allocator, RecordAllocator::ClassId cls,
                       uint64_t slabs, std::vector<uint32_t>* victims) {
  absl::flat_hash_map<uint32_t, SlabUse> uses;
  const auto for_each_slab = [&](auto visit) {
    uint64_t position = 0;
    for (uint32_t other = 0; other < order.classes(); ++other) {
      if (other == cls) continue;
      order.Walk(other, [&](uint32_t number) {
        ++position;
        for (const uint64_t offset : table.At(number).offset) {
          if (offset != kNoOffset) visit(allocator.SlabOf(offset), number, position);
        }
        return true;
      });
    }
  };
  for_each_slab([&](uint32_t slab, uint32_t, uint64_t position) {
    SlabUse& use = uses[slab];
    ++use.evictable;
    use.warmth = position;
  });
  std::vector<std::pair<uint64_t, uint32_t>> emptied;  // warmth, slab
  for (const auto& [slab, use] : uses) {
    if (use.evictable == allocator.RecordsInSlab(slab)) emptied.emplace_back(use.warmth, slab);
  }
  if (emptied.size() < slabs) return false;
  std::sort(emptied.begin(), emptied.end());
  absl::flat_hash_set<uint32_t> taken;
  for (uint64_t i = 0; i < slabs; ++i) taken.insert(emptied[i].second);
  absl::flat_hash_set<uint32_t> chosen;
  for_each_slab([&](uint32_t slab, uint32_t number, uint64_t) {
    if (taken.contains(slab) && chosen.insert(number).second) victims->push_back(number);
  });
  return true;
}

}  // namespace

std::optional<std::vector<uint32_t>> PlanEviction(const BlockTable& table,
                                                  const EvictionOrder& order,
                                                  const RecordAllocator& allocator,
                                                  RecordAllocator::ClassId cls, uint64_t blocks) {
  std::vector<uint32_t> victims;
  const uint64_t need = blocks * kPlanes;
  if (need > allocator.CapacityOf(cls)) return std::nullopt;
  uint64_t records = allocator.Available(cls);
  uint64_t numbers = table.NumbersLeft();
  const auto enough = [&] { return records >= need && numbers >= blocks; };
  if (enough()) return victims;
  order.Walk(cls, [&](uint32_t number) {
    const Block& block = table.At(number);
    for (const uint64_t offset : block.offset) records += offset != kNoOffset ? 1 : 0;
    ++numbers;
    victims.push_back(number);
    return !enough();
  });
  if (enough()) return victims;
  if (records < need) {
    const uint64_t slabs = CeilDiv(need - records, allocator.RecordsPerSlab(cls));
    const size_t before = victims.size();
    if (!TakeSlabsOfOthers(table, order, allocator, cls, slabs, &victims)) return std::nullopt;
    numbers += victims.size() - before;
  }
  if (numbers < blocks) return std::nullopt;
  return victims;
}

}  // namespace kvt
