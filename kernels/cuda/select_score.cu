// Scores: kernels/cuda/select_blocks.h.
#include <algorithm>
#include <climits>

#include "kernels/base/check.h"
#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/select_blocks.h"
#include "kernels/cuda/select_math.h"
#include "kernels/cuda/select_spec.h"

namespace kvt {
namespace {

constexpr int kScoreThreads = kScoreBurstBlocks * kBlockTokens;
constexpr int kScoreWarps = kScoreThreads / kWarpLanes;
// Bursts that share one quantisation of their queries.
constexpr int kBurstsPerThreadBlock = 4;
constexpr int kShareThreads = 256;

// What the first launch leaves of the queries of all rows; part p is query p % queries of row
// p / queries.
struct ScoreParts {
  float* sums;  // [part][burst][kScoreBurstBlocks]: of a block's weights below the burst's largest
  int32_t* max;    // [part][burst]: the largest logit
  float* factors;  // [part][burst]: what sums are times, to be below the row's largest
  float* step2;    // [part]: log2(e) * scale * step of the query
  float* shares;   // [part]: 1 / (mass * queries)
};

struct ScoreParams {
  SelectSpec spec;
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
static_assert(sizeof(ScoreParams) <= kLaunchParamsBytesMax);

// One warp: a query in 8 bits; its step2.
__device__ float QuantiseQuery(const ScoreParams& params, const float* q, const float* scale,
                               int8_t* out) {
  const int lane = threadIdx.x % kWarpLanes;
  uint32_t largest = 0;
  for (int d = lane; d < params.spec.head_dim; d += kWarpLanes) {
    largest = max(largest, SelectMagnitude(q[d] * scale[d]));
  }
  const SelectQueryScale query = SelectQueryScaleOf(__reduce_max_sync(kAllLanes, largest));
  for (int d = lane; d < params.spec.head_dim; d += kWarpLanes) {
    out[d] = SelectQueryCode(q[d] * scale[d], query);
  }
  return query.step * params.scale * kScoreLog2E;
}

template <int kQueries>
struct ScoreShared {
  alignas(16) int32_t q[kQueries * kDigestHeadDimMax / 4];
  float step2[kQueries];
  int32_t max[kQueries][kScoreWarps];
};

// One burst of a row for `count` queries of a head, whose parts are number `part` and on.
template <int kBits, int kQueries>
__device__ void ScoreBurst(const ScoreParams& params, const ScoreSegment& segment, int h, int burst,
                           int count, size_t part, ScoreShared<kQueries>& shared) {
  const int block = burst * kScoreBurstBlocks + static_cast<int>(threadIdx.x) / kBlockTokens;
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
    if (threadIdx.x % kWarpLanes == 0) shared.max[i][threadIdx.x / kWarpLanes] = most;
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
      params.parts.sums[at * kScoreBurstBlocks + threadIdx.x / kBlockTokens] = weight;
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
  const int end = min(begin + kBurstsPerThreadBlock, ScoreBursts(segment.blocks));
  if (begin >= end) return;
  __shared__ ScoreShared<kQueries> shared;
  const DigestHead& head = params.spec.heads[h];
  const int words = params.spec.head_dim / 4;
  for (int first = 0; first < params.group; first += kQueries) {
    const int count = min(kQueries, params.group - first);
    const size_t part = size_t{blockIdx.y} * static_cast<size_t>(params.queries) +
                        static_cast<size_t>(h * params.group + first);
    for (int i = static_cast<int>(threadIdx.x) / kWarpLanes; i < kQueries; i += kScoreWarps) {
      // Those past the last are computed with it and not used.
      const int query = head.kv_head * params.group + first + min(i, count - 1);
      const float* q = params.q + ptrdiff_t{segment.row} * params.q_stride +
                       ptrdiff_t{query} * params.spec.head_dim;
      const float step2 =
          QuantiseQuery(params, q, head.scale, reinterpret_cast<int8_t*>(shared.q + i * words));
      if (threadIdx.x % kWarpLanes != 0) continue;
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
__global__ void __launch_bounds__(kWarpLanes)
    MassKernel(const __grid_constant__ ScoreParams params) {
  const int bursts = ScoreBursts(params.segments[blockIdx.y].blocks);
  if (bursts == 0) return;
  const size_t part = size_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const size_t at = part * static_cast<size_t>(params.bursts_max);
  const int lane = static_cast<int>(threadIdx.x);
  const float step2 = params.parts.step2[part];
  int32_t most = INT_MIN;
  for (int i = lane; i < bursts; i += kWarpLanes) most = max(most, params.parts.max[at + i]);
  most = __reduce_max_sync(kAllLanes, most);
  for (int i = lane; i < bursts; i += kWarpLanes) {
    params.parts.factors[at + i] = SelectWeight(params.parts.max[at + i], most, step2);
  }
  __syncwarp();
  // A lane is a place in the bursts, both halves of the warp alike: the CPU's order again.
  const float* sums = params.parts.sums + at * kScoreBurstBlocks + lane % kScoreBurstBlocks;
  float mass = 0;
  for (int i = 0; i < bursts; ++i) {
    mass = fmaf(params.parts.factors[at + i], sums[i * kScoreBurstBlocks], mass);
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
    const size_t part =
        size_t{blockIdx.y} * static_cast<size_t>(params.queries) + static_cast<size_t>(query);
    const size_t at = part * static_cast<size_t>(params.bursts_max);
    const float factor = params.parts.factors[at + block / kScoreBurstBlocks];
    score = fmaf(factor * params.parts.shares[part],
                 params.parts.sums[at * kScoreBurstBlocks + block], score);
  }
  segment.scores[block] = score;
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

size_t PartBytes(size_t bursts) { return (bursts * (kScoreBurstBlocks + 2) + 2) * sizeof(float); }

ScoreParts PartsAt(void* workspace, size_t parts, size_t bursts) {
  ScoreParts at;
  at.sums = static_cast<float*>(workspace);
  at.max = reinterpret_cast<int32_t*>(at.sums + parts * bursts * kScoreBurstBlocks);
  at.factors = reinterpret_cast<float*>(at.max + parts * bursts);
  at.step2 = at.factors + parts * bursts;
  at.shares = at.step2 + parts;
  return at;
}

absl::Status ValidateScore(const ScoreBlocksArgs& args) {
  constexpr char kOp[] = "score blocks";
  KVT_RETURN_IF_ERROR(ValidateSelectSpec(kOp, args.geometry, args.spec));
  if (args.query_heads <= 0 || args.query_heads % args.geometry.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(kOp, ": query_heads = ", args.query_heads,
                                                   ", kv_heads = ", args.geometry.kv_heads));
  }
  if (args.q == nullptr || !IsAligned(args.digests, sizeof(uint32_t))) {
    return absl::InvalidArgumentError(
        absl::StrCat(kOp, ": q is null, or digests null or not 4-byte aligned"));
  }
  for (const ScoreSegment& segment : args.segments) {
    if (segment.blocks < 0 || segment.row < 0 ||
        (segment.blocks > 0 && segment.scores == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat(kOp, ": a segment with blocks = ", segment.blocks, ", row = ", segment.row,
                       segment.scores == nullptr ? ", scores null" : ""));
    }
  }
  return absl::OkStatus();
}

}  // namespace

size_t CudaScoreWorkspaceBytes(int queries, int rows, int blocks) {
  return PartBytes(static_cast<size_t>(ScoreBursts(blocks))) * static_cast<size_t>(queries) *
         static_cast<size_t>(rows);
}

absl::Status CudaScoreBlocks(const ScoreBlocksArgs& args, void* workspace, size_t workspace_bytes,
                             CUstream_st* stream) {
  constexpr char kOp[] = "score blocks";
  KVT_RETURN_IF_ERROR(ValidateScore(args));
  int blocks_max = 0;
  for (const ScoreSegment& segment : args.segments)
    blocks_max = std::max(blocks_max, segment.blocks);
  if (blocks_max == 0) return absl::OkStatus();
  ScoreParams params = {};
  params.spec = SelectSpecOf(args.spec, args.geometry.head_dim);
  params.digests = args.digests;
  params.q = args.q;
  params.q_stride = args.q_stride;
  params.group = args.query_heads / args.geometry.kv_heads;
  params.queries = params.spec.head_count * params.group;
  params.bursts_max = ScoreBursts(blocks_max);
  params.scale = args.scale;
  const size_t needed =
      CudaScoreWorkspaceBytes(params.queries, static_cast<int>(args.segments.size()), blocks_max);
  if (!IsAligned(workspace, 16) || workspace_bytes < needed) {
    return absl::InvalidArgumentError(absl::StrCat(kOp, ": workspace of ", workspace_bytes,
                                                   " bytes, needs ", needed, ", 16-byte aligned"));
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
                                   dim3(static_cast<unsigned>(params.queries), row_count),
                                   kWarpLanes, stream, params));
    const auto blocks = static_cast<unsigned>(blocks_max);
    KVT_RETURN_IF_ERROR(CudaLaunch(kOp, ShareKernel,
                                   dim3((blocks + kShareThreads - 1) / kShareThreads, row_count),
                                   kShareThreads, stream, params));
  }
  return absl::OkStatus();
}

}  // namespace kvt
