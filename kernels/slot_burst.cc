#include "kernels/slot_burst.h"

#include "absl/strings/str_cat.h"

namespace kvt {
namespace {

absl::Status ValidateCommon(const char* op, const void* slots, uint32_t slot_bytes,
                            uint32_t slot_count, const void* list, const void* burst, int count) {
  if (count < 0) return absl::InvalidArgumentError(absl::StrCat(op, ": count = ", count));
  if (count == 0) return absl::OkStatus();
  if (slots == nullptr || reinterpret_cast<uintptr_t>(slots) % 64 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": slots is null or not 64-byte aligned"));
  }
  if (slot_bytes == 0 || slot_bytes % 64 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(op, ": slot_bytes = ", slot_bytes, " is not a positive multiple of 64"));
  }
  if (slot_count == 0) return absl::InvalidArgumentError(absl::StrCat(op, ": slot_count = 0"));
  if (list == nullptr) return absl::InvalidArgumentError(absl::StrCat(op, ": the list is null"));
  if (burst == nullptr || reinterpret_cast<uintptr_t>(burst) % 16 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": burst is null or not 16-byte aligned"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateGatherSlots(const GatherSlotsArgs& args) {
  return ValidateCommon("gather slots", args.slots, args.slot_bytes, args.slot_count,
                        args.slot_ids, args.burst, args.count);
}

absl::Status ValidateScatterSlots(const ScatterSlotsArgs& args) {
  return ValidateCommon("scatter slots", args.slots, args.slot_bytes, args.slot_count,
                        args.entries, args.burst, args.count);
}

}  // namespace kvt
