// Arguments of gather and scatter of slots, shared by every backend.
//
// A burst is a contiguous buffer of `count` slot images of slot_bytes each, as the tier sends and
// receives it. Pointers are the device's (host pointers on the CPU).
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/paged_kv.h"

namespace kvt {

// burst[i] = slot slot_ids[i].
struct GatherSlotsArgs {
  const uint8_t* slots = nullptr;  // 64-byte aligned
  uint32_t slot_bytes = 0;         // multiple of 64
  uint32_t slot_count = 0;         // slots in the allocation; every id is below it
  const uint32_t* slot_ids = nullptr;
  uint8_t* burst = nullptr;  // 16-byte aligned
  int count = 0;
};

// One slot image of a burst: where it goes, and the table entry that it fills.
struct ScatterEntry {
  uint32_t slot = kSlotNone;
  Plane plane = Plane::kBase;
  SlotPair* table_entry = nullptr;  // null: only the bytes; else its `plane` half becomes `slot`
};

// slot entries[i].slot = burst[i], then the table entries. Two images never name one slot or one
// half of one table entry.
struct ScatterSlotsArgs {
  uint8_t* slots = nullptr;
  uint32_t slot_bytes = 0;
  uint32_t slot_count = 0;
  const ScatterEntry* entries = nullptr;
  const uint8_t* burst = nullptr;
  int count = 0;
};

// InvalidArgument naming the field: alignment, multiples, null pointers. Does not read device memory.
[[nodiscard]] absl::Status ValidateGatherSlots(const GatherSlotsArgs& args);
[[nodiscard]] absl::Status ValidateScatterSlots(const ScatterSlotsArgs& args);

}  // namespace kvt
