#include "kernels/cpu/select_blocks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/cpu/select_task.h"
#include "kernels/layout/named_layout.h"
#include "kernels/layout/planes.h"

namespace kvt {
namespace {

constexpr int kHeadDimMax = 256;

void CheckSpec(const Geometry& geometry, const DigestSpec& spec) {
  KVT_CHECK(geometry.head_dim % 32 == 0 && geometry.head_dim <= kHeadDimMax, geometry.ToString());
  KVT_CHECK(spec.bits >= kDigestBitsMin && spec.bits <= kDigestBitsMax, "bits=", spec.bits);
  KVT_CHECK(!spec.heads.empty() && static_cast<int>(spec.heads.size()) <= kDigestHeadsMax,
            "heads=", spec.heads.size());
  for (const DigestHead& head : spec.heads) {
    KVT_CHECK(head.kv_head >= 0 && head.kv_head < geometry.kv_heads, "kv_head=", head.kv_head);
  }
}

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
const ScoreIsa& IsaAt(int index) {
  return HasAvx512() && index == 0 ? kScoreIsaAvx512 : kScoreIsaAvx2;
}
const ScoreIsa*& Chosen() {
  static const ScoreIsa* chosen = &IsaAt(0);
  return chosen;
}

// Where the parts of a row's queries lie: [segment][query][blocks_max].
int BlocksMax(absl::Span<const ScoreSegment> segments) {
  int most = 0;
  for (const ScoreSegment& segment : segments) most = std::max(most, segment.blocks);
  return most;
}

int GroupSize(const ScoreBlocksArgs& args) { return args.query_heads / args.geometry.kv_heads; }

// Up to kScoreQueriesMax queries of one selecting head, scaled for its codes.
void ScaleQueries(const ScoreBlocksArgs& args, const DigestHead& head, int row, int first, int count,
                  float* out) {
  const int dim = args.geometry.head_dim;
  for (int i = 0; i < count; ++i) {
    const int query_head = head.kv_head * GroupSize(args) + first + i;
    const float* q = args.q + ptrdiff_t{row} * args.q_stride + ptrdiff_t{query_head} * dim;
    for (int d = 0; d < dim; ++d) out[i * dim + d] = q[d] * head.scale[d] * args.scale;
  }
}

}  // namespace

void CpuMakeDigest(const MakeDigestArgs& args, TeamMember& member) {
  const Geometry& geometry = args.geometry;
  CheckSpec(geometry, args.spec);
  const int dim = geometry.head_dim;
  const uint32_t head_bytes = DigestHeadBytes(dim, args.spec.bits);
  const uint32_t bytes = args.spec.Bytes(dim);
  float inverse[kHeadDimMax];
  const auto [begin, end] = member.Share(args.count);
  for (size_t h = 0; h < args.spec.heads.size(); ++h) {
    const DigestHead& head = args.spec.heads[h];
    for (int d = 0; d < dim; ++d) inverse[d] = 1.0f / head.scale[d];
    const size_t slice = static_cast<size_t>(head.kv_head) * geometry.SliceBytes();
    for (int i = begin; i < end; ++i) {
      const SlotPair pair = args.blocks[i];
      KVT_CHECK(pair.base != kSlotNone, "block ", i, " has no slot");
      const uint8_t* base = args.slots + size_t{pair.base} * geometry.SlotBytes() + slice;
      const uint8_t* residual =
          pair.residual == kSlotNone
              ? nullptr
              : args.slots + size_t{pair.residual} * geometry.SlotBytes() + slice;
      const uint32_t entry = args.entries == nullptr ? static_cast<uint32_t>(i) : args.entries[i];
      uint8_t* digest = args.digests + size_t{entry} * bytes + h * head_bytes;
      std::memset(digest, 0, head_bytes);
      for (int d = 0; d < dim; ++d) {
        for (int t = 0; t < kBlockTokens; ++t) {
          const uint32_t at = KOffset(t, d);
          const uint16_t bits =
              residual == nullptr ? JoinBase(base[at]) : JoinTarget(base[at], residual[at]);
          SetDigestCode(digest, dim, args.spec.bits, t, d,
                        DigestQuantise(HalfToFloat(bits), head.offset[d], inverse[d],
                                       args.spec.bits));
        }
      }
    }
  }
}

size_t CpuScoreWorkspaceBytes(int queries, int rows, int blocks) {
  return RoundUp(sizeof(BlockPart) * static_cast<size_t>(queries) * static_cast<size_t>(rows) *
                     static_cast<size_t>(blocks), 64);
}

void CpuScoreBlocks(const ScoreBlocksArgs& args, Workspace workspace, TeamMember& member) {
  CheckSpec(args.geometry, args.spec);
  KVT_CHECK(args.query_heads % args.geometry.kv_heads == 0, "query_heads=", args.query_heads);
  const int dim = args.geometry.head_dim;
  const int group = GroupSize(args);
  const int heads = static_cast<int>(args.spec.heads.size());
  const int blocks_max = BlocksMax(args.segments);
  const int queries = heads * group;
  KVT_CHECK(workspace.bytes >= CpuScoreWorkspaceBytes(queries, static_cast<int>(args.segments.size()),
                                                      blocks_max), "workspace=", workspace.bytes);
  int64_t total = 0;
  for (const ScoreSegment& segment : args.segments) total += segment.blocks;
  // This member's share of all blocks, cut into its pieces of the segments.
  const int64_t begin = total * member.index() / member.count();
  const int64_t end = total * (member.index() + 1) / member.count();
  alignas(64) float q[kScoreQueriesMax * kHeadDimMax];
  int64_t before = 0;
  for (size_t s = 0; s < args.segments.size(); before += args.segments[s].blocks, ++s) {
    const ScoreSegment& segment = args.segments[s];
    const int first = static_cast<int>(std::max<int64_t>(begin - before, 0));
    const int last = static_cast<int>(std::min<int64_t>(end - before, segment.blocks));
    if (first >= last) continue;
    BlockPart* row = reinterpret_cast<BlockPart*>(workspace.data) +
                     s * static_cast<size_t>(queries) * static_cast<size_t>(blocks_max);
    for (int query = 0; query < queries;) {
      const int h = query / group;
      const int count = std::min(kScoreQueriesMax, group - query % group);
      ScaleQueries(args, args.spec.heads[static_cast<size_t>(h)], segment.row, query % group, count,
                   q);
      const ScoreTask task{q, count, dim, args.spec.bits};
      const size_t offset = static_cast<size_t>(h) * DigestHeadBytes(dim, args.spec.bits);
      const uint32_t bytes = args.spec.Bytes(dim);
      BlockPart* parts = row + static_cast<size_t>(query) * static_cast<size_t>(blocks_max);
      for (int b = first; b < last; ++b) {
        const uint32_t entry = segment.entries == nullptr
                                   ? segment.first_entry + static_cast<uint32_t>(b)
                                   : segment.entries[b];
        Chosen()->block(task, args.digests + size_t{entry} * bytes + offset, parts + b, blocks_max);
      }
      query += count;
    }
  }
}

void CpuScoreBlocksCombine(const ScoreBlocksArgs& args, Workspace workspace, TeamMember& member) {
  const int blocks_max = BlocksMax(args.segments);
  const int queries = static_cast<int>(args.spec.heads.size()) * GroupSize(args);
  const auto [begin, end] = member.Share(static_cast<int>(args.segments.size()));
  for (int s = begin; s < end; ++s) {
    const ScoreSegment& segment = args.segments[static_cast<size_t>(s)];
    std::fill_n(segment.scores, segment.blocks, 0.0f);
    for (int query = 0; query < queries; ++query) {
      const BlockPart* parts = reinterpret_cast<const BlockPart*>(workspace.data) +
                               (static_cast<size_t>(s) * static_cast<size_t>(queries) +
                                static_cast<size_t>(query)) * static_cast<size_t>(blocks_max);
      Chosen()->combine(parts, segment.blocks, queries, segment.scores);
    }
  }
}

namespace {

// Ascending keys: the larger score first, then the lower index; a NaN last.
uint64_t RankKey(float score, int32_t index) {
  const float number = std::isnan(score) ? -INFINITY : score + 0.0f;  // -0 is 0
  const auto bits = std::bit_cast<uint32_t>(number);
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (uint64_t{~ascending} << 32) | static_cast<uint32_t>(index);
}

}  // namespace

size_t CpuSelectWorkspaceBytes(int rows, int blocks) {
  return RoundUp(sizeof(uint64_t) * static_cast<size_t>(rows) * static_cast<size_t>(blocks), 64);
}

void CpuSelectTopBlocks(const SelectTopBlocksArgs& args, Workspace workspace, TeamMember& member) {
  const int rows = static_cast<int>(args.segments.size());
  KVT_CHECK(workspace.bytes >= CpuSelectWorkspaceBytes(rows, args.blocks_max),
            "workspace=", workspace.bytes);
  const auto [begin, end] = member.Share(rows);
  for (int s = begin; s < end; ++s) {
    const SelectSegment& segment = args.segments[static_cast<size_t>(s)];
    KVT_CHECK(segment.blocks <= args.blocks_max && segment.count >= 0, "blocks=", segment.blocks);
    uint64_t* order = reinterpret_cast<uint64_t*>(workspace.data) +
                      static_cast<size_t>(s) * static_cast<size_t>(args.blocks_max);
    for (int b = 0; b < segment.blocks; ++b) order[b] = RankKey(segment.scores[b], b);
    const int count = std::min(segment.count, segment.blocks);
    if (count < segment.blocks) std::nth_element(order, order + count, order + segment.blocks);
    for (int i = 0; i < count; ++i) segment.selected[i] = static_cast<int32_t>(order[i]);
    std::sort(segment.selected, segment.selected + count);
  }
}

int CpuScoreIsaCount() { return HasAvx512() ? 2 : 1; }
absl::string_view CpuScoreIsaName(int index) { return IsaAt(index).name; }
void CpuScoreUseIsa(int index) { Chosen() = &IsaAt(index); }

}  // namespace kvt
