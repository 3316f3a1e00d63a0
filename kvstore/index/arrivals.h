// Which slices of a block under way have arrived: one bit per plane and slice (layer x head), so
// that pushes of layers and head ranges may come in any order and twice. Pure; not thread-safe
// (owned by BlockIndex). Bitmaps are recycled: no allocation once warm.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/layout/geometry.h"

namespace kvt {

class Arrivals {
 public:
  // A map of `slices` slices per plane, none arrived.
  uint32_t Start(uint32_t slices);
  void End(uint32_t id);

  // Precondition: the range lies within the slices. A slice that has arrived stays so.
  void Mark(uint32_t id, Plane plane, uint32_t first, uint32_t count);
  // The bytes of these slices are undefined again.
  void Clear(uint32_t id, Plane plane, uint32_t first, uint32_t count);
  // Every slice of both planes has arrived.
  [[nodiscard]] bool IsComplete(uint32_t id) const {
    return maps_[id].missing[0] == 0 && maps_[id].missing[1] == 0;
  }

 private:
  struct Map {
    uint32_t slices = 0;
    std::array<uint32_t, kPlanes> missing{};
    std::vector<uint64_t> bits;  // plane 0's words, then plane 1's
  };
  std::vector<Map> maps_;
  std::vector<uint32_t> free_;
};

}  // namespace kvt
