#include "kvstore/node/checksum_table.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt {

ChecksumTable::Entry& ChecksumTable::Prepare(uint32_t block, uint32_t generation, uint32_t slices) {
  if (block >= entries_.size()) entries_.resize(block + 1);
  Entry& entry = entries_[block];
  if (entry.generation == generation) return entry;
  entry.generation = generation;
  entry.slices = slices;
  entry.none.fill(false);
  if (entry.room < slices) {
    value_bytes_ += uint64_t{kPlanes} * (slices - entry.room) * sizeof(uint64_t);
    entry.room = slices;
    entry.values = std::make_unique<uint64_t[]>(uint64_t{kPlanes} * slices);
  }
  return entry;
}

void ChecksumTable::Set(uint32_t block, uint32_t generation, uint32_t slices, Plane plane,
                        uint32_t first, absl::Span<const uint64_t> checksums) {
  Entry& entry = Prepare(block, generation, slices);
  KVT_CHECK(slices == entry.slices && first <= slices && checksums.size() <= slices - first,
            "slices ", first, " + ", checksums.size(), " of ", entry.slices);
  uint64_t* const values = entry.values.get() + static_cast<size_t>(plane) * entry.room;
  std::copy(checksums.begin(), checksums.end(), values + first);
}

void ChecksumTable::SetNone(uint32_t block, uint32_t generation, uint32_t slices, Plane plane) {
  Prepare(block, generation, slices).none[static_cast<size_t>(plane)] = true;
}

absl::Span<const uint64_t> ChecksumTable::Get(uint32_t block, uint32_t generation,
                                              Plane plane) const {
  if (block >= entries_.size() || entries_[block].generation != generation) return {};
  const Entry& entry = entries_[block];
  if (entry.none[static_cast<size_t>(plane)]) return {};
  return {entry.values.get() + static_cast<size_t>(plane) * entry.room, entry.slices};
}

}  // namespace kvt
