#include "kvstore/index/arrivals.h"

#include "kernels/base/check.h"
#include "kernels/base/units.h"

namespace kvt {

uint32_t Arrivals::Start(uint32_t slices) {
  uint32_t id;
  if (free_.empty()) {
    id = static_cast<uint32_t>(maps_.size());
    maps_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  Map& map = maps_[id];
  map.slices = slices;
  map.missing.fill(slices);
  map.bits.assign(kPlanes * CeilDiv(slices, 64), 0);
  return id;
}

void Arrivals::End(uint32_t id) { free_.push_back(id); }

void Arrivals::Mark(uint32_t id, Plane plane, uint32_t first, uint32_t count) {
  Map& map = maps_[id];
  KVT_CHECK(first <= map.slices && count <= map.slices - first, first, " + ", count);
  const auto p = static_cast<size_t>(plane);
  uint64_t* words = map.bits.data() + p * CeilDiv(map.slices, 64);
  for (uint32_t slice = first; slice < first + count; ++slice) {
    const uint64_t bit = uint64_t{1} << (slice % 64);
    if ((words[slice / 64] & bit) == 0) --map.missing[p];
    words[slice / 64] |= bit;
  }
}

void Arrivals::Clear(uint32_t id, Plane plane, uint32_t first, uint32_t count) {
  Map& map = maps_[id];
  KVT_CHECK(first <= map.slices && count <= map.slices - first, first, " + ", count);
  const auto p = static_cast<size_t>(plane);
  uint64_t* words = map.bits.data() + p * CeilDiv(map.slices, 64);
  for (uint32_t slice = first; slice < first + count; ++slice) {
    const uint64_t bit = uint64_t{1} << (slice % 64);
    if ((words[slice / 64] & bit) != 0) ++map.missing[p];
    words[slice / 64] &= ~bit;
  }
}

}  // namespace kvt
