// The checksums of every block's slices, as its writer gave them, by block number. Kept beside the
// index: they stay with a block while it lives and go to readers at lookup. Not thread-safe (the
// node's lock). Memory is kept per block number and reused: no allocation once warm.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kernels/layout/geometry.h"

namespace kvt {

class ChecksumTable {
 public:
  // Slices [first, first + checksums.size()) of a plane of the block of that generation; a first
  // call for a generation forgets what was there. Precondition: the range lies within `slices`.
  void Set(uint32_t block, uint32_t generation, uint32_t slices, Plane plane, uint32_t first,
           absl::Span<const uint64_t> checksums);
  // A slice of the plane was written without a checksum: the plane has none.
  void SetNone(uint32_t block, uint32_t generation, uint32_t slices, Plane plane);
  // The plane's checksums, one per slice; empty when it has none.
  [[nodiscard]] absl::Span<const uint64_t> Get(uint32_t block, uint32_t generation,
                                               Plane plane) const;
  // Heap, about.
  [[nodiscard]] uint64_t MemoryBytes() const {
    return entries_.capacity() * sizeof(Entry) + value_bytes_;
  }

 private:
  struct Entry {
    uint32_t generation = 0;
    uint32_t slices = 0;
    uint32_t room = 0;  // of each plane
    std::array<bool, kPlanes> none{};
    std::unique_ptr<uint64_t[]> values;  // both planes
  };
  Entry& Prepare(uint32_t block, uint32_t generation, uint32_t slices);

  std::vector<Entry> entries_;
  uint64_t value_bytes_ = 0;
};

}  // namespace kvt
