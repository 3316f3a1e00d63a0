#include "kernels/cpu/select_blocks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/cpu/select_task.h"

namespace kvt {
namespace {

// Queries of one head that are quantised at once.
constexpr int kGroupMax = 16;

bool CanRun(const ScoreIsa& isa) {
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (&isa == &kScoreIsaVnni) return avx512 && __builtin_cpu_supports("avx512vnni");
  return avx512 || &isa == &kScoreIsaAvx2;
}
// Those that this processor can run, best first.
const std::vector<const ScoreIsa*>& Isas() {
  static const std::vector<const ScoreIsa*> isas = [] {
    std::vector<const ScoreIsa*> can;
    for (const ScoreIsa* isa : {&kScoreIsaVnni, &kScoreIsaAvx512, &kScoreIsaAvx2}) {
      if (CanRun(*isa)) can.push_back(isa);
    }
    return can;
  }();
  return isas;
}
const ScoreIsa*& Chosen() {
  static const ScoreIsa* chosen = Isas()[0];
  return chosen;
}

int BlocksMax(absl::Span<const ScoreSegment> segments) {
  int most = 0;
  for (const ScoreSegment& segment : segments) most = std::max(most, segment.blocks);
  return most;
}

int GroupSize(const ScoreBlocksArgs& args) { return args.query_heads / args.geometry.kv_heads; }
int Queries(const ScoreBlocksArgs& args) {
  return static_cast<int>(args.spec.heads.size()) * GroupSize(args);
}

// A query's piece of the workspace: sums, largest logits (both of whole vectors), step2.
size_t QueryBytes(int blocks) {
  const size_t bursts = RoundUp(static_cast<size_t>(ScoreBursts(blocks)), kScoreBurstBlocks);
  return bursts * (kScoreBurstBlocks * sizeof(float) + sizeof(int32_t)) + 64;
}
QueryParts PartsAt(Workspace workspace, int blocks_max, size_t index) {
  uint8_t* at = workspace.data + index * QueryBytes(blocks_max);
  const size_t bursts = RoundUp(static_cast<size_t>(ScoreBursts(blocks_max)), kScoreBurstBlocks);
  QueryParts parts;
  parts.sums = reinterpret_cast<float*>(at);
  parts.max = reinterpret_cast<int32_t*>(at + bursts * kScoreBurstBlocks * sizeof(float));
  parts.step2 = reinterpret_cast<float*>(parts.max + bursts);
  return parts;
}

// Bursts [begin, end) of a row for the queries of one of the layer's heads, whose parts are number
// `index` and on in the workspace.
void ScoreHead(const ScoreBlocksArgs& args, const ScoreSegment& segment, size_t h, int begin, int end,
               Workspace workspace, int blocks_max, size_t index) {
  const DigestHead& head = args.spec.heads[h];
  const int dim = args.geometry.head_dim;
  const int group = GroupSize(args);
  alignas(64) int8_t q[kGroupMax * kDigestHeadDimMax];
  float step2[kGroupMax];
  QueryParts parts[kGroupMax];
  for (int first = 0; first < group; first += kGroupMax) {
    const int count = std::min(kGroupMax, group - first);
    for (int i = 0; i < count; ++i) {
      const float* from = args.q + ptrdiff_t{segment.row} * args.q_stride +
                          ptrdiff_t{head.kv_head * group + first + i} * dim;
      step2[i] = DigestQuantiseQuery(from, head.scale, dim, q + i * dim) * args.scale * kScoreLog2E;
      parts[i] = PartsAt(workspace, blocks_max, index + static_cast<size_t>(first + i));
    }
    ScoreTask task;
    task.q = q;
    task.step2 = step2;
    task.parts = parts;
    task.queries = count;
    task.head_dim = dim;
    task.bits = args.spec.bits;
    task.digests = args.digests + h * DigestHeadBytes(dim, args.spec.bits);
    task.stride = args.spec.Bytes(dim);
    task.entries = segment.entries;
    task.first_entry = segment.first_entry;
    task.blocks = segment.blocks;
    Chosen()->score(task, begin, end);
  }
}

}  // namespace

void CheckDigestSpec(const Geometry& geometry, const DigestSpec& spec) {
  KVT_CHECK(geometry.head_dim % kDigestChannelsMultiple == 0 &&
            geometry.head_dim <= kDigestHeadDimMax, geometry.ToString());
  KVT_CHECK(spec.bits >= kDigestBitsMin && spec.bits <= kDigestBitsMax, "bits=", spec.bits);
  KVT_CHECK(!spec.heads.empty() && static_cast<int>(spec.heads.size()) <= kDigestHeadsMax,
            "heads=", spec.heads.size());
  for (const DigestHead& head : spec.heads) {
    KVT_CHECK(head.kv_head >= 0 && head.kv_head < geometry.kv_heads, "kv_head=", head.kv_head);
  }
}

size_t CpuScoreWorkspaceBytes(int queries, int rows, int blocks) {
  return QueryBytes(blocks) * static_cast<size_t>(queries) * static_cast<size_t>(rows);
}

void CpuScoreBlocks(const ScoreBlocksArgs& args, Workspace workspace, TeamMember& member) {
  CheckDigestSpec(args.geometry, args.spec);
  KVT_CHECK(args.query_heads % args.geometry.kv_heads == 0, "query_heads=", args.query_heads);
  const int blocks_max = BlocksMax(args.segments);
  const int group = GroupSize(args);
  const int queries = Queries(args);
  KVT_CHECK(workspace.bytes >= CpuScoreWorkspaceBytes(queries, static_cast<int>(args.segments.size()),
                                                      blocks_max), "workspace=", workspace.bytes);
  int64_t total = 0;
  for (const ScoreSegment& segment : args.segments) total += ScoreBursts(segment.blocks);
  // This member's share of all bursts, cut into its pieces of the segments.
  const int64_t begin = total * member.index() / member.count();
  const int64_t end = total * (member.index() + 1) / member.count();
  int64_t before = 0;
  for (size_t s = 0; s < args.segments.size(); before += ScoreBursts(args.segments[s++].blocks)) {
    const ScoreSegment& segment = args.segments[s];
    const int first = static_cast<int>(std::max<int64_t>(begin - before, 0));
    const int last = static_cast<int>(std::min<int64_t>(end - before, ScoreBursts(segment.blocks)));
    if (first >= last) continue;
    for (size_t h = 0; h < args.spec.heads.size(); ++h) {
      ScoreHead(args, segment, h, first, last, workspace, blocks_max,
                s * static_cast<size_t>(queries) + h * static_cast<size_t>(group));
    }
  }
}

void CpuScoreBlocksCombine(const ScoreBlocksArgs& args, Workspace workspace, TeamMember& member) {
  const int blocks_max = BlocksMax(args.segments);
  const int queries = Queries(args);
  const auto [begin, end] = member.Share(static_cast<int>(args.segments.size()));
  for (int s = begin; s < end; ++s) {
    const ScoreSegment& segment = args.segments[static_cast<size_t>(s)];
    if (segment.blocks == 0) continue;
    for (int query = 0; query < queries; ++query) {
      const QueryParts parts = PartsAt(workspace, blocks_max,
                                       static_cast<size_t>(s) * static_cast<size_t>(queries) +
                                           static_cast<size_t>(query));
      Chosen()->combine(parts, segment.blocks, queries, query > 0, segment.scores);
    }
  }
}

namespace {

// In order of scores, as unsigned numbers; a NaN as the least.
uint32_t RankKey(float score) {
  const float number = std::isnan(score) ? -INFINITY : score + 0.0f;  // -0 is 0
  const auto bits = std::bit_cast<uint32_t>(number);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

int CountFrom(const uint32_t* keys, int count, uint32_t least) {
  int found = 0;
  for (int i = 0; i < count; ++i) found += keys[i] >= least ? 1 : 0;
  return found;
}

// What at least `wanted` (in [1, count]) keys reach: exactly so many, or it is the largest such number.
// Bit by bit from the top: passes over all keys without a branch on one beat a partial sort, whose
// branches are all guesses.
uint32_t Threshold(const uint32_t* keys, int count, int wanted) {
  uint32_t threshold = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    const int found = CountFrom(keys, count, threshold | bit);
    if (found < wanted) continue;
    threshold |= bit;
    if (found == wanted) break;  // exactly those
  }
  return threshold;
}

void SelectTop(const SelectSegment& segment, uint32_t* keys) {
  const int wanted = std::min(segment.count, segment.blocks);
  if (wanted == 0) return;
  for (int b = 0; b < segment.blocks; ++b) keys[b] = RankKey(segment.scores[b]);
  const uint32_t threshold = Threshold(keys, segment.blocks, wanted);
  const int above = threshold == UINT32_MAX ? 0 : CountFrom(keys, segment.blocks, threshold + 1);
  int equal = wanted - above;  // of those at the threshold, the first so many
  int taken = 0;
  for (int b = 0; b < segment.blocks && taken < wanted; ++b) {
    const bool at = keys[b] == threshold;
    const bool take = keys[b] > threshold || (at && equal > 0);
    segment.selected[taken] = b;  // stays if it is taken
    taken += take ? 1 : 0;
    equal -= at ? 1 : 0;
  }
}

}  // namespace

size_t CpuSelectWorkspaceBytes(int rows, int blocks) {
  return RoundUp(sizeof(uint32_t) * static_cast<size_t>(rows) * static_cast<size_t>(blocks), 64);
}

void CpuSelectTopBlocks(const SelectTopBlocksArgs& args, Workspace workspace, TeamMember& member) {
  const int rows = static_cast<int>(args.segments.size());
  KVT_CHECK(workspace.bytes >= CpuSelectWorkspaceBytes(rows, args.blocks_max),
            "workspace=", workspace.bytes);
  const auto [begin, end] = member.Share(rows);
  for (int s = begin; s < end; ++s) {
    const SelectSegment& segment = args.segments[static_cast<size_t>(s)];
    KVT_CHECK(segment.blocks <= args.blocks_max && segment.count >= 0, "blocks=", segment.blocks);
    SelectTop(segment, reinterpret_cast<uint32_t*>(workspace.data) +
                           static_cast<size_t>(s) * static_cast<size_t>(args.blocks_max));
  }
}

int CpuScoreIsaCount() { return static_cast<int>(Isas().size()); }
const ScoreIsa& CpuScoreIsaAt(int index) { return *Isas()[static_cast<size_t>(index)]; }
void CpuScoreUseIsa(int index) { Chosen() = &CpuScoreIsaAt(index); }

}  // namespace kvt
