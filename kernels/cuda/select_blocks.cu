#include "kernels/cuda/select_blocks.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <climits>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/select_math.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"

namespace kvt {
namespace {

constexpr int kHeadDimMax = 256;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;
// Rows of one launch: they travel as its parameters, which may have 4 KiB.
constexpr int kSelectSegmentsPerLaunch = 64;
constexpr int kDigestThreads = 128;
constexpr int kScoreThreads = kSelectBurstBlocks * kBlockTokens;
constexpr int kScoreWarps = kScoreThreads / kWarp;
// Bursts that share one quantisation of their queries.
constexpr int kBurstsPerThreadBlock = 4;
constexpr int kShareThreads = 256;
constexpr int kTopThreads = 512;
constexpr int kTopWarps = kTopThreads / kWarp;

__host__ __device__ constexpr int Bursts(int blocks) {
  return (blocks + kSelectBurstBlocks - 1) / kSelectBurstBlocks;
}

struct SpecParams {
  DigestHead heads[kDigestHeadsMax];
  int head_count;
  int head_dim;
  uint32_t head_bytes;
  uint32_t digest_bytes;
};

SpecParams ParamsOf(const DigestSpec& spec, int head_dim) {
  SpecParams params = {};
  std::copy(spec.heads.begin(), spec.heads.end(), params.heads);
  params.head_count = static_cast<int>(spec.heads.size());
  params.head_dim = head_dim;
  params.head_bytes = DigestHeadBytes(head_dim, spec.bits);
  params.digest_bytes = spec.Bytes(head_dim);
  return params;
}

// ---- digests

struct DigestParams {
  SpecParams spec;
  const uint8_t* slots;
  const SlotPair* blocks;
  const uint32_t* entries;
  uint8_t* digests;
  int count;
  uint32_t slot_bytes;
  uint32_t slice_bytes;
};

// A thread makes the codes of 32 channels of one token.
template <int kBits>
__global__ void __launch_bounds__(kDigestThreads)
    DigestKernel(const __grid_constant__ DigestParams params) {
  const SpecParams& spec = params.spec;
  const int64_t thread = int64_t{blockIdx.x} * kDigestThreads + threadIdx.x;
  const int token = static_cast<int>(thread % kBlockTokens);
  const int64_t group = thread / kBlockTokens;
  const int first = static_cast<int>(group % (spec.head_dim / 32)) * 32;
  const int64_t task = group / (spec.head_dim / 32);
  const int h = static_cast<int>(task % spec.head_count);
  const int64_t block = task / spec.head_count;
  if (block >= params.count) return;

  const DigestHead& head = spec.heads[h];
  const SlotPair pair = params.blocks[block];
  if (pair.base == kSlotNone) __trap();
  const size_t slice = static_cast<size_t>(head.kv_head) * params.slice_bytes;
  const uint8_t* base = params.slots + size_t{pair.base} * params.slot_bytes + slice;
  const uint8_t* residual =
      pair.residual == kSlotNone
          ? nullptr
          : params.slots + size_t{pair.residual} * params.slot_bytes + slice;
  const uint32_t entry =
      params.entries == nullptr ? static_cast<uint32_t>(block) : params.entries[block];
  auto* digest = reinterpret_cast<uint32_t*>(params.digests + size_t{entry} * spec.digest_bytes +
                                             static_cast<size_t>(h) * spec.head_bytes);
  uint32_t codes[32];
  KVT_UNROLL
  for (int i = 0; i < 32; ++i) {
    const int d = first + i;
    const uint32_t at = KOffset(token, d);
    const uint16_t bits =
        residual == nullptr ? JoinBase(base[at]) : JoinTarget(base[at], residual[at]);
    codes[i] = SelectKeyCode(__half2float(__ushort_as_half(bits)), head.offset[d],
                             1.0f / head.scale[d], kBits);
  }
  SelectWriteCodes<kBits>(digest, spec.head_dim, token, first,
                          [&](int i) { return codes[i]; });
}

// ---- scores

// What the first launch leaves of the queries of all rows; part p is query p % queries of row
// p / queries.
struct ScoreParts {
  float* sums;     // [part][burst][kSelectBurstBlocks]: of a block's weights below the burst's largest
  int32_t* max;    // [part][burst]: the largest logit
  float* factors;  // [part][burst]: what sums are times, to be below the row's largest
  float* step2;    // [part]: log2(e) * scale * step of the query
  float* shares;   // [part]: 1 / (mass * queries)
};

struct ScoreParams {
  SpecParams spec;
  ScoreSegment segments[kSelectSegmentsPerLaunch];
  ScoreParts parts;  // of the launch's first row
  const uint8_t* digests;
  const float* q;
  int q_stride;
  int group;
  int queries;
  int bursts_max;
  float scale;
};
static_assert(sizeof(ScoreParams) <= 4096);

// One warp: a query in 8 bits; its step2.
__device__ float QuantiseQuery(const ScoreParams& params, const float* q, const float* scale,
                               int8_t* out) {
  const int lane = threadIdx.x % kWarp;
  uint32_t largest = 0;
  for (int d = lane; d < params.spec.head_dim; d += kWarp) {
    largest = max(largest, SelectMagnitude(q[d] * scale[d]));
  }
  const SelectQueryScale query = SelectQueryScaleOf(__reduce_max_sync(kAllLanes, largest));
  for (int d = lane; d < params.spec.head_dim; d += kWarp) {
    out[d] = SelectQueryCode(q[d] * scale[d], query);
  }
  return query.step * params.scale * kSelectLog2E;
}

template <int kQueries>
struct ScoreShared {
  int32_t q[kQueries * kHeadDimMax / 4];
  float step2[kQueries];
  int32_t max[kQueries][kScoreWarps];
};

// One burst of a row for `count` queries of a head, whose parts are number `part` and on.
template <int kBits, int kQueries>
__device__ void ScoreBurst(const ScoreParams& params, const ScoreSegment& segment, int h, int burst,
                           int count, size_t part, ScoreShared<kQueries>& shared) {
  const int block = burst * kSelectBurstBlocks + static_cast<int>(threadIdx.x) / kBlockTokens;
  const int token = threadIdx.x % kBlockTokens;
  const bool is_there = block < segment.blocks;
  int32_t logits[kQueries];
  if (is_there) {
    const uint32_t entry = segment.entries == nullptr
                               ? segment.first_entry + static_cast<uint32_t>(block)
                               : segment.entries[block];
    const uint8_t* digest = params.digests + size_t{entry} * params.spec.digest_bytes +
                            static_cast<size_t>(h) * params.spec.head_bytes;
    SelectLogits<kBits>(reinterpret_cast<const uint32_t*>(digest), params.spec.head_dim, token,
                        shared.q, logits);
  }
  KVT_UNROLL
  for (int i = 0; i < kQueries; ++i) {
    if (!is_there) logits[i] = INT_MIN;
    const int32_t most = __reduce_max_sync(kAllLanes, logits[i]);
    if (threadIdx.x % kWarp == 0) shared.max[i][threadIdx.x / kWarp] = most;
  }
  __syncthreads();
  KVT_UNROLL
  for (int i = 0; i < kQueries; ++i) {
    if (i >= count) break;
    int32_t most = shared.max[i][0];
    for (int w = 1; w < kScoreWarps; ++w) most = max(most, shared.max[i][w]);
    float weight = is_there ? SelectWeight(logits[i], most, shared.step2[i]) : 0.0f;
    // (0 + 2) + (1 + 3) of each quarter, then the quarters: the CPU's order.
    for (const int other : {2, 1, 4, 8}) weight += __shfl_xor_sync(kAllLanes, weight, other);
    const size_t at = (part + static_cast<size_t>(i)) * static_cast<size_t>(params.bursts_max) +
                      static_cast<size_t>(burst);
    if (token == 0) {
      params.parts.sums[at * kSelectBurstBlocks + threadIdx.x / kBlockTokens] = weight;
    }
    if (threadIdx.x == 0) params.parts.max[at] = most;
  }
  __syncthreads();  // before the maxima are written again
}

// Thread block: some bursts (x) of one row (y) for one selecting head (z).
template <int kBits, int kQueries>
__global__ void __launch_bounds__(kScoreThreads)
    ScoreKernel(const __grid_constant__ ScoreParams params) {
  const ScoreSegment& segment = params.segments[blockIdx.y];
  const int h = static_cast<int>(blockIdx.z);
  const int begin = static_cast<int>(blockIdx.x) * kBurstsPerThreadBlock;
  const int end = min(begin + kBurstsPerThreadBlock, Bursts(segment.blocks));
  if (begin >= end) return;
  __shared__ ScoreShared<kQueries> shared;
  const DigestHead& head = params.spec.heads[h];
  const int words = params.spec.head_dim / 4;
  for (int first = 0; first < params.group; first += kQueries) {
    const int count = min(kQueries, params.group - first);
    const size_t part = size_t{blockIdx.y} * static_cast<size_t>(params.queries) +
                        static_cast<size_t>(h * params.group + first);
    for (int i = static_cast<int>(threadIdx.x) / kWarp; i < kQueries; i += kScoreWarps) {
      // Those past the last are computed with it and not used.
      const int query = head.kv_head * params.group + first + min(i, count - 1);
      const float* q = params.q + ptrdiff_t{segment.row} * params.q_stride +
                       ptrdiff_t{query} * params.spec.head_dim;
      const float step2 = QuantiseQuery(params, q, head.scale,
                                        reinterpret_cast<int8_t*>(shared.q + i * words));
      if (threadIdx.x % kWarp != 0) continue;
      shared.step2[i] = step2;
      if (begin == 0 && i < count) params.parts.step2[part + static_cast<size_t>(i)] = step2;
    }
    __syncthreads();
    for (int burst = begin; burst < end; ++burst) {
      ScoreBurst<kBits, kQueries>(params, segment, h, burst, count, part, shared);
    }
  }
}

// One warp: one query (x) of one row (y).
__global__ void __launch_bounds__(kWarp) MassKernel(const __grid_constant__ ScoreParams params) {
  const int bursts = Bursts(params.segments[blockIdx.y].blocks);
  if (bursts == 0) return;
  const size_t part = size_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const size_t at = part * static_cast<size_t>(params.bursts_max);
  const int lane = static_cast<int>(threadIdx.x);
  const float step2 = params.parts.step2[part];
  int32_t most = INT_MIN;
  for (int i = lane; i < bursts; i += kWarp) most = max(most, params.parts.max[at + i]);
  most = __reduce_max_sync(kAllLanes, most);
  for (int i = lane; i < bursts; i += kWarp) {
    params.parts.factors[at + i] = SelectWeight(params.parts.max[at + i], most, step2);
  }
  __syncwarp();
  // A lane is a place in the bursts, both halves of the warp alike: the CPU's order again.
  const float* sums = params.parts.sums + at * kSelectBurstBlocks + lane % kSelectBurstBlocks;
  float mass = 0;
  for (int i = 0; i < bursts; ++i) {
    mass = fmaf(params.parts.factors[at + i], sums[i * kSelectBurstBlocks], mass);
  }
  for (const int other : {8, 4, 2, 1}) mass += __shfl_xor_sync(kAllLanes, mass, other);
  if (lane == 0) params.parts.shares[part] = 1.0f / (mass * static_cast<float>(params.queries));
}

// A thread is one block (x) of one row (y).
__global__ void __launch_bounds__(kShareThreads)
    ShareKernel(const __grid_constant__ ScoreParams params) {
  const ScoreSegment& segment = params.segments[blockIdx.y];
  const int block = static_cast<int>(blockIdx.x * kShareThreads + threadIdx.x);
  if (block >= segment.blocks) return;
  float score = 0;
  for (int query = 0; query < params.queries; ++query) {
    const size_t part = size_t{blockIdx.y} * static_cast<size_t>(params.queries) +
                        static_cast<size_t>(query);
    const size_t at = part * static_cast<size_t>(params.bursts_max);
    const float factor = params.parts.factors[at + block / kSelectBurstBlocks];
    score = fmaf(factor * params.parts.shares[part],
                 params.parts.sums[at * kSelectBurstBlocks + block], score);
  }
  segment.scores[block] = score;
}

// ---- top blocks

struct TopParams {
  SelectSegment segments[kSelectSegmentsPerLaunch];
};
static_assert(sizeof(TopParams) <= 4096);

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
  for (int distance = 1; distance < kWarp; distance *= 2) {
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
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned votes = __ballot_sync(kAllLanes, yes);
  if (threadIdx.x % kWarp == 0) shared.warp_counts[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << threadIdx.x % kWarp) - 1));
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
    if (thread < kWarp) NarrowThreshold(shared, shift);
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

// ---- launches

absl::Status ValidateSpec(const char* op, const Geometry& geometry, const DigestSpec& spec) {
  const auto bad = [op](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", what...));
  };
  if (geometry.head_dim <= 0 || geometry.head_dim % kDigestChannelsMultiple != 0 ||
      geometry.head_dim > kHeadDimMax || geometry.kv_heads <= 0) {
    return bad("geometry ", geometry.ToString());
  }
  if (spec.bits < kDigestBitsMin || spec.bits > kDigestBitsMax) return bad("bits = ", spec.bits);
  if (spec.heads.empty() || static_cast<int>(spec.heads.size()) > kDigestHeadsMax) {
    return bad(spec.heads.size(), " selecting heads; 1 to ", kDigestHeadsMax);
  }
  for (const DigestHead& head : spec.heads) {
    if (head.kv_head < 0 || head.kv_head >= geometry.kv_heads) {
      return bad("kv_head = ", head.kv_head, " of ", geometry.kv_heads);
    }
    if (head.offset == nullptr || head.scale == nullptr) return bad("a head's channels are null");
  }
  return absl::OkStatus();
}

bool IsAligned(const void* pointer, uintptr_t to) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % to == 0;
}

using DigestKernelPointer = void (*)(DigestParams);
DigestKernelPointer DigestKernelOf(int bits) {
  return bits == 2 ? DigestKernel<2> : bits == 3 ? DigestKernel<3> : DigestKernel<4>;
}

using ScoreKernelPointer = void (*)(ScoreParams);
template <int kBits>
ScoreKernelPointer ScoreKernelOfGroup(int group) {
  if (group == 1) return ScoreKernel<kBits, 1>;
  if (group == 2) return ScoreKernel<kBits, 2>;
  return group <= 4 ? ScoreKernel<kBits, 4> : ScoreKernel<kBits, 8>;
}
ScoreKernelPointer ScoreKernelOf(int bits, int group) {
  return bits == 2   ? ScoreKernelOfGroup<2>(group)
         : bits == 3 ? ScoreKernelOfGroup<3>(group)
                     : ScoreKernelOfGroup<4>(group);
}

size_t PartBytes(size_t bursts) {
  return (bursts * (kSelectBurstBlocks + 2) + 2) * sizeof(float);
}

ScoreParts PartsAt(void* workspace, size_t parts, size_t bursts) {
  ScoreParts at;
  at.sums = static_cast<float*>(workspace);
  at.max = reinterpret_cast<int32_t*>(at.sums + parts * bursts * kSelectBurstBlocks);
  at.factors = reinterpret_cast<float*>(at.max + parts * bursts);
  at.step2 = at.factors + parts * bursts;
  at.shares = at.step2 + parts;
  return at;
}

absl::Status ValidateScore(const ScoreBlocksArgs& args) {
  constexpr char kOp[] = "score blocks";
  KVT_RETURN_IF_ERROR(ValidateSpec(kOp, args.geometry, args.spec));
  if (args.query_heads <= 0 || args.query_heads % args.geometry.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        kOp, ": query_heads = ", args.query_heads, ", kv_heads = ", args.geometry.kv_heads));
  }
  if (args.q == nullptr || !IsAligned(args.digests, sizeof(uint32_t))) {
    return absl::InvalidArgumentError(
        absl::StrCat(kOp, ": q is null, or digests null or not 4-byte aligned"));
  }
  for (const ScoreSegment& segment : args.segments) {
    if (segment.blocks < 0 || segment.row < 0 ||
        (segment.blocks > 0 && segment.scores == nullptr)) {
      return absl::InvalidArgumentError(absl::StrCat(
          kOp, ": a segment with blocks = ", segment.blocks, ", row = ", segment.row,
          segment.scores == nullptr ? ", scores null" : ""));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CudaMakeDigest(const MakeDigestArgs& args, CUstream_st* stream) {
  constexpr char kOp[] = "make digest";
  KVT_RETURN_IF_ERROR(ValidateSpec(kOp, args.geometry, args.spec));
  if (args.count < 0) return absl::InvalidArgumentError(absl::StrCat(kOp, ": count = ", args.count));
  if (args.count == 0) return absl::OkStatus();
  if (args.slots == nullptr || args.blocks == nullptr ||
      !IsAligned(args.digests, sizeof(uint32_t))) {
    return absl::InvalidArgumentError(
        absl::StrCat(kOp, ": slots or blocks is null, or digests null or not 4-byte aligned"));
  }
  DigestParams params = {};
  params.spec = ParamsOf(args.spec, args.geometry.head_dim);
  params.slots = args.slots;
  params.blocks = args.blocks;
  params.entries = args.entries;
  params.digests = args.digests;
  params.count = args.count;
  params.slot_bytes = args.geometry.SlotBytes();
  params.slice_bytes = args.geometry.SliceBytes();
  const int64_t threads = int64_t{args.count} * params.spec.head_count *
                          (params.spec.head_dim / 32) * kBlockTokens;
  const auto grid = static_cast<unsigned>((threads + kDigestThreads - 1) / kDigestThreads);
  return CudaLaunch(kOp, DigestKernelOf(args.spec.bits), dim3(grid), kDigestThreads, stream, params);
}

size_t CudaScoreWorkspaceBytes(int queries, int rows, int blocks) {
  return PartBytes(static_cast<size_t>(Bursts(blocks))) * static_cast<size_t>(queries) *
         static_cast<size_t>(rows);
}

absl::Status CudaScoreBlocks(const ScoreBlocksArgs& args, void* workspace, size_t workspace_bytes,
                             CUstream_st* stream) {
  constexpr char kOp[] = "score blocks";
  KVT_RETURN_IF_ERROR(ValidateScore(args));
  int blocks_max = 0;
  for (const ScoreSegment& segment : args.segments) blocks_max = std::max(blocks_max, segment.blocks);
  if (blocks_max == 0) return absl::OkStatus();
  ScoreParams params = {};
  params.spec = ParamsOf(args.spec, args.geometry.head_dim);
  params.digests = args.digests;
  params.q = args.q;
  params.q_stride = args.q_stride;
  params.group = args.query_heads / args.geometry.kv_heads;
  params.queries = params.spec.head_count * params.group;
  params.bursts_max = Bursts(blocks_max);
  params.scale = args.scale;
  const size_t needed = CudaScoreWorkspaceBytes(params.queries,
                                                static_cast<int>(args.segments.size()), blocks_max);
  if (!IsAligned(workspace, 16) || workspace_bytes < needed) {
    return absl::InvalidArgumentError(absl::StrCat(
        kOp, ": workspace of ", workspace_bytes, " bytes, needs ", needed, ", 16-byte aligned"));
  }
  // Launches follow each other on the stream, so each may use the workspace from its start.
  for (size_t done = 0; done < args.segments.size(); done += kSelectSegmentsPerLaunch) {
    const auto rows = args.segments.subspan(done, kSelectSegmentsPerLaunch);
    std::copy(rows.begin(), rows.end(), params.segments);
    const auto row_count = static_cast<unsigned>(rows.size());
    params.parts = PartsAt(workspace, rows.size() * static_cast<size_t>(params.queries),
                           static_cast<size_t>(params.bursts_max));
    const auto bursts = static_cast<unsigned>(params.bursts_max);
    const dim3 grid((bursts + kBurstsPerThreadBlock - 1) / kBurstsPerThreadBlock, row_count,
                    static_cast<unsigned>(params.spec.head_count));
    KVT_RETURN_IF_ERROR(CudaLaunch(kOp, ScoreKernelOf(args.spec.bits, params.group), grid,
                                   kScoreThreads, stream, params));
    KVT_RETURN_IF_ERROR(CudaLaunch(kOp, MassKernel,
                                   dim3(static_cast<unsigned>(params.queries), row_count), kWarp,
                                   stream, params));
    const auto blocks = static_cast<unsigned>(blocks_max);
    KVT_RETURN_IF_ERROR(CudaLaunch(kOp, ShareKernel,
                                   dim3((blocks + kShareThreads - 1) / kShareThreads, row_count),
                                   kShareThreads, stream, params));
  }
  return absl::OkStatus();
}

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
