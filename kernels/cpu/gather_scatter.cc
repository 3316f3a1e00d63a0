#include "kernels/cpu/gather_scatter.h"

#include <cstring>

#include "kernels/base/check.h"

namespace kvt {
namespace {

// [begin, end) of `count` items for one thread.
struct Share {
  int begin;
  int end;
};
Share ShareOf(int count, int thread, int threads) {
  KVT_CHECK(thread >= 0 && thread < threads, "thread=", thread, " threads=", threads);
  const auto at = [&](int t) { return static_cast<int>(int64_t{count} * t / threads); };
  return {at(thread), at(thread + 1)};
}

}  // namespace

void CpuGatherSlots(const GatherSlotsArgs& args, int thread, int threads) {
  const Share share = ShareOf(args.count, thread, threads);
  for (int i = share.begin; i < share.end; ++i) {
    KVT_CHECK(args.slot_ids[i] < args.slot_count, "slot ", args.slot_ids[i], " of ",
              args.slot_count);
    std::memcpy(args.burst + size_t{args.slot_bytes} * static_cast<size_t>(i),
                args.slots + size_t{args.slot_bytes} * args.slot_ids[i], args.slot_bytes);
  }
}

void CpuScatterSlots(const ScatterSlotsArgs& args, int thread, int threads) {
  const Share share = ShareOf(args.count, thread, threads);
  for (int i = share.begin; i < share.end; ++i) {
    const ScatterEntry& entry = args.entries[i];
    KVT_CHECK(entry.slot < args.slot_count, "slot ", entry.slot, " of ", args.slot_count);
    std::memcpy(args.slots + size_t{args.slot_bytes} * entry.slot,
                args.burst + size_t{args.slot_bytes} * static_cast<size_t>(i), args.slot_bytes);
    if (entry.table_entry != nullptr) {
      uint32_t& half = entry.plane == Plane::kBase ? entry.table_entry->base
                                                   : entry.table_entry->residual;
      half = entry.slot;
    }
  }
}

}  // namespace kvt
