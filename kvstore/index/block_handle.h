// Handles of blocks and of their records. A handle is (generation << 32) | record index, never
// zero; the record index of a block's plane is 2 * block number + plane, and both planes of a block
// share one generation. So a block's handle is its BASE record's handle, the RESIDUAL record's is
// one higher, and planes of two contents can never be joined (DESIGN 3). The data plane's
// RecordHandle (kvstore/transport/piece.h) and the record table (kvstore/media/record_table.h) use
// the same form.
#pragma once

#include <cstdint>

#include "kernels/layout/geometry.h"

namespace kvt {

constexpr uint64_t MakeBlockHandle(uint32_t block, uint32_t generation) {
  return (static_cast<uint64_t>(generation) << 32) | (static_cast<uint64_t>(block) * kPlanes);
}
// The handle that the data plane takes for one plane of the block.
constexpr uint64_t RecordHandleOf(uint64_t block_handle, Plane plane) {
  return block_handle + static_cast<uint64_t>(plane);
}
constexpr uint32_t BlockNumberOf(uint64_t handle) {
  return static_cast<uint32_t>(handle) / kPlanes;
}
constexpr Plane PlaneOf(uint64_t handle) { return static_cast<Plane>(handle % kPlanes); }
constexpr uint32_t HandleGeneration(uint64_t handle) { return static_cast<uint32_t>(handle >> 32); }

}  // namespace kvt
