// Top blocks: kernels/cuda/select_blocks.h.
#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/select_blocks.h"
#include "kernels/cuda/select_math.h"
#include "kernels/cuda/select_spec.h"

namespace kvt {
namespace {

constexpr int kTopThreads = 512;
constexpr int kTopWarps = kTopThreads / kWarpLanes;

struct TopParams {
  SelectSegment segments[kSelectSegmentsPerLaunch];
};
static_assert(sizeof(TopParams) <= kLaunchParamsBytesMax);

struct TopShared {
  int histogram[256];
  uint32_t threshold;  // the bits of it that are known
  int wanted;          // of the keys that share them
  int warp_counts[kTopWarps];
};

// One warp, after the keys were counted by their next eight bits: finds the bits that the last key
// taken has there. Lane l looks at eight values, the largest ones in lane 0.
__device__ void NarrowThreshold(TopShared& shared, int shift) {
  const int lane = static_cast<int>(threadIdx.x);
  const int top = 255 - 8 * lane;
  int mine = 0;
  for (int i = 0; i < 8; ++i) mine += shared.histogram[top - i];
  int up_to = mine;
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const int below = __shfl_up_sync(kAllLanes, up_to, distance);
    if (lane >= distance) up_to += below;
  }
  const int wanted = shared.wanted;
  __syncwarp();
  int left = wanted - (up_to - mine);
  if (left <= 0 || left > mine) return;  // not in this lane's eight
  int value = top;
  for (; left > shared.histogram[value]; --value) left -= shared.histogram[value];
  shared.threshold |= static_cast<uint32_t>(value) << shift;
  shared.wanted = left;
}

// How many threads before this one say yes, and how many of all.
__device__ int RankAmongThreads(bool yes, TopShared& shared, int* total) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const unsigned votes = __ballot_sync(kAllLanes, yes);
  if (threadIdx.x % kWarpLanes == 0) shared.warp_counts[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << threadIdx.x % kWarpLanes) - 1));
  int sum = 0;
  for (int w = 0; w < kTopWarps; ++w) {
    if (w < warp) before += shared.warp_counts[w];
    sum += shared.warp_counts[w];
  }
  *total = sum;
  __syncthreads();  // before the counts are written again
  return before;
}

// Thread block: one row.
__global__ void __launch_bounds__(kTopThreads) TopKernel(const __grid_constant__ TopParams params) {
  const SelectSegment& segment = params.segments[blockIdx.x];
  const int wanted = min(segment.count, segment.blocks);
  if (wanted == 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  __shared__ TopShared shared;
  if (thread == 0) {
    shared.threshold = 0;
    shared.wanted = wanted;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (thread < 256) shared.histogram[thread] = 0;
    __syncthreads();
    const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8);
    const uint32_t threshold = shared.threshold;
    for (int b = thread; b < segment.blocks; b += kTopThreads) {
      const uint32_t key = SelectRank(segment.scores[b]);
      if ((key & known) == threshold) atomicAdd(&shared.histogram[key >> shift & 0xff], 1);
    }
    __syncthreads();
    if (thread < kWarpLanes) NarrowThreshold(shared, shift);
    __syncthreads();
  }
  // All above the threshold, and the first so many at it.
  const uint32_t threshold = shared.threshold;
  const int equal = shared.wanted;
  int equal_before = 0;
  int taken = 0;
  for (int first = 0; first < segment.blocks && taken < wanted; first += kTopThreads) {
    const int b = first + thread;
    const bool is_there = b < segment.blocks;
    const uint32_t key = is_there ? SelectRank(segment.scores[b]) : 0;
    const bool at = is_there && key == threshold;
    int total = 0;
    const int equal_rank = equal_before + RankAmongThreads(at, shared, &total);
    equal_before += total;
    const bool take = is_there && (key > threshold || (at && equal_rank < equal));
    const int place = taken + RankAmongThreads(take, shared, &total);
    taken += total;
    if (take) segment.selected[place] = b;
  }
}

}  // namespace

absl::Status CudaSelectTopBlocks(const SelectTopBlocksArgs& args, CUstream_st* stream) {
  constexpr char kOp[] = "select top blocks";
  for (const SelectSegment& segment : args.segments) {
    const bool writes = std::min(segment.count, segment.blocks) > 0;
    if (segment.blocks < 0 || segment.count < 0 || segment.blocks > args.blocks_max ||
        (writes && (segment.scores == nullptr || segment.selected == nullptr))) {
      return absl::InvalidArgumentError(absl::StrCat(
          kOp, ": a segment with blocks = ", segment.blocks, " (at most ", args.blocks_max,
          "), count = ", segment.count, segment.scores == nullptr ? ", scores null" : "",
          segment.selected == nullptr ? ", selected null" : ""));
    }
  }
  for (size_t done = 0; done < args.segments.size(); done += kSelectSegmentsPerLaunch) {
    const auto rows = args.segments.subspan(done, kSelectSegmentsPerLaunch);
    TopParams params = {};
    std::copy(rows.begin(), rows.end(), params.segments);
    KVT_RETURN_IF_ERROR(CudaLaunch(kOp, TopKernel, dim3(static_cast<unsigned>(rows.size())),
                                   kTopThreads, stream, params));
  }
  return absl::OkStatus();
}

}  // namespace kvt
