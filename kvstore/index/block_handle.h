// Handles. A block handle is (generation << 32) | block number, never zero. The data plane names a
// block's two records (kvstore/transport/piece.h, kvstore/media/record_table.h) by the same
// generation and record index 2 * block + plane, so a RESIDUAL plane is only ever joined with the
// BASE plane of the same generation, and planes of two contents never are (DESIGN 3).
#pragma once

#include <cstdint>

#include "kernels/layout/geometry.h"

namespace kvt {

// A plane that a block does not have.
inline constexpr uint64_t kNoOffset = UINT64_MAX;

constexpr uint64_t MakeBlockHandle(uint32_t block, uint32_t generation) {
  return (static_cast<uint64_t>(generation) << 32) | block;
}
constexpr uint32_t BlockNumberOf(uint64_t block_handle) {
  return static_cast<uint32_t>(block_handle);
}

// The record handle of one plane of the block: what the data plane takes.
constexpr uint64_t PlaneRecordHandle(uint64_t block_handle, Plane plane) {
  return (block_handle & 0xFFFF'FFFF'0000'0000u) |
         ((block_handle & 0x7FFF'FFFFu) << 1 | static_cast<uint64_t>(plane));
}
constexpr uint32_t BlockOfRecord(uint64_t record_handle) {
  return static_cast<uint32_t>(record_handle) / kPlanes;
}
constexpr Plane PlaneOfRecord(uint64_t record_handle) {
  return static_cast<Plane>(record_handle % kPlanes);
}

// Of either kind of handle.
constexpr uint32_t GenerationOfHandle(uint64_t handle) {
  return static_cast<uint32_t>(handle >> 32);
}

}  // namespace kvt
