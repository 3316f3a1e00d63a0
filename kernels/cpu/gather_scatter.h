// Gather and scatter of slots on the CPU: the reference of kernels/cuda/gather_scatter.h.
//
// A *burst* is a contiguous buffer of `count` slot images (slot_bytes each), as the tier sends it.
// Gather copies slots into a burst; scatter copies a burst into slots and then writes the block
// table entries that it fills, so that one stream-ordered operation makes the blocks readable.
// Thread-safe for distinct outputs; no allocation; moves 2 * count * slot_bytes bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/slot_burst.h"

namespace kvt {

void CpuGatherSlots(const GatherSlotsArgs& args, int thread, int threads);
void CpuScatterSlots(const ScatterSlotsArgs& args, int thread, int threads);

}  // namespace kvt
