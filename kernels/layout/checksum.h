// The checksum of one slice (layer, plane, KV head): XXH3-64 of its bytes, mixed with a seed made
// from the block's key and the slice's place, so that bytes of another block or place
// never pass. Made where the slice is written, given to the reader at lookup, checked where it
// arrives and when it leaves disk.
//
// CopyWithChecksum is the data path's form: one pass that copies with streaming stores (when
// `streaming`) and hashes the same registers; its result equals SliceChecksum of the copied bytes
// bit for bit (test: tests/unit/kernels/layout/checksum_test.cc). Thread-safe, no allocation.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/layout/geometry.h"

namespace kvt {

// Seed of a slice: key_hash = first 64 bits of the block's key; generation-independent on purpose:
// a block keeps its checksums when it moves between records (spill, promotion).
[[nodiscard]] uint64_t ChecksumSeed(uint64_t key_hash, Plane plane, uint32_t slice_index);

[[nodiscard]] uint64_t SliceChecksum(const void* bytes, size_t size, uint64_t seed);

// Copies `size` bytes (a multiple of 64; `dst` 64-byte aligned when `streaming`) and returns
// the checksum of what was copied. Streaming stores need one StreamingFence() per batch.
// `ahead`: null, or where `size` bytes begin that are copied soon: prefetched in step, which keeps
// the memory busy across the ends of scattered pieces.
[[nodiscard]] uint64_t CopyWithChecksum(void* dst, const void* src, size_t size, uint64_t seed,
                                        bool streaming, const void* ahead = nullptr);
// The same copy without a checksum.
void CopyBytes(void* dst, const void* src, size_t size, bool streaming,
               const void* ahead = nullptr);
void StreamingFence();

}  // namespace kvt
