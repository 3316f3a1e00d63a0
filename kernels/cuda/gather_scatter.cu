#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/gather_scatter.h"

namespace kvt {
namespace {

constexpr int kThreads = 256;

// `pieces` of 16 bytes from `from` to `to`, by one thread block.
__device__ void CopySlot(uint4* __restrict__ to, const uint4* __restrict__ from, uint32_t pieces) {
  for (uint32_t i = threadIdx.x; i < pieces; i += kThreads) to[i] = from[i];
}

__global__ void __launch_bounds__(kThreads) GatherKernel(GatherSlotsArgs args) {
  const uint32_t slot = args.slot_ids[blockIdx.x];
  if (slot >= args.slot_count) __trap();
  CopySlot(reinterpret_cast<uint4*>(args.burst + size_t{blockIdx.x} * args.slot_bytes),
           reinterpret_cast<const uint4*>(args.slots + size_t{slot} * args.slot_bytes),
           args.slot_bytes / sizeof(uint4));
}

__global__ void __launch_bounds__(kThreads) ScatterKernel(ScatterSlotsArgs args) {
  const ScatterEntry entry = args.entries[blockIdx.x];
  if (entry.slot >= args.slot_count) __trap();
  CopySlot(reinterpret_cast<uint4*>(args.slots + size_t{entry.slot} * args.slot_bytes),
           reinterpret_cast<const uint4*>(args.burst + size_t{blockIdx.x} * args.slot_bytes),
           args.slot_bytes / sizeof(uint4));
  // Readers of the table come later in the stream, so no order is needed within the kernel.
  if (threadIdx.x == 0 && entry.table_entry != nullptr) {
    if (entry.plane == Plane::kBase) {
      entry.table_entry->base = entry.slot;
    } else {
      entry.table_entry->residual = entry.slot;
    }
  }
}

}  // namespace

absl::Status CudaGatherSlots(const GatherSlotsArgs& args, CUstream_st* stream) {
  absl::Status status = ValidateGatherSlots(args);
  if (!status.ok() || args.count == 0) return status;
  return CudaLaunch("gather slots", GatherKernel, dim3(static_cast<unsigned>(args.count)), kThreads,
                    stream, args);
}

absl::Status CudaScatterSlots(const ScatterSlotsArgs& args, CUstream_st* stream) {
  absl::Status status = ValidateScatterSlots(args);
  if (!status.ok() || args.count == 0) return status;
  return CudaLaunch("scatter slots", ScatterKernel, dim3(static_cast<unsigned>(args.count)),
                    kThreads, stream, args);
}

}  // namespace kvt
