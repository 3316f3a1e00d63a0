#include "kernels/cpu/paged_attention.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/base/check.h"
#include "kernels/cpu/attention_task.h"

namespace kvt {
namespace {

static_assert(kAttentionTile == kAttentionTileTokens && kAttentionRange == kAttentionRangeTokens);

// Query vectors per KV head up to which a segment's context is split over threads.
constexpr int kSplitVectorsMax = 48;
// Tasks a thread should have at least, so that they divide evenly.
constexpr int kTasksPerThread = 8;
// What reading and converting a key costs, in query vectors.
constexpr int64_t kKeyCost = 10;

struct IsaList {
  std::array<const AttentionIsa*, 3> isas{};
  int count = 0;
  int chosen = 0;
};

IsaList FindIsas(ComputeType compute) {
  IsaList list;
  const auto add = [&](const AttentionIsa& isa) {
    list.isas[static_cast<size_t>(list.count++)] = &isa;
  };
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool dot = compute == ComputeType::kBf16 && avx512 && __builtin_cpu_supports("avx512bf16");
  // Zen issues as many bf16 dot products as f32 FMA, twice the work. Sapphire and Emerald Rapids
  // issue a quarter (82 against 167 GFLOP/s a core): there f32 products are better in both ways.
  const bool dot_first = dot && __builtin_cpu_is("amd");
  if (dot_first) add(AttentionAvx512Bf16());
  if (avx512) add(AttentionAvx512());
  if (dot && !dot_first) add(AttentionAvx512Bf16());
  add(AttentionAvx2());
  return list;
}

IsaList& Isas(ComputeType compute) {
  static std::array<IsaList, 2> lists = {FindIsas(ComputeType::kF32), FindIsas(ComputeType::kBf16)};
  return lists[static_cast<size_t>(compute)];
}

const AttentionIsa& ChosenIsa(ComputeType compute) {
  const IsaList& list = Isas(compute);
  return *list.isas[static_cast<size_t>(list.chosen)];
}

size_t ScratchBytes(int head_dim) { return (AttentionScratchBytes(head_dim) + 63) / 64 * 64; }

int Ranges(int keys) { return (keys + kAttentionRange - 1) / kAttentionRange; }

// How one call is cut into tasks: a function of the arguments, the workspace and the number of
// threads, so that every thread finds the same.
class Plan {
 public:
  Plan(const PagedAttentionArgs& args, Workspace workspace, int threads)
      : args_(args), threads_(threads), kv_heads_(args.geometry.kv_heads),
        group_(args.query_heads / args.geometry.kv_heads) {
    const size_t scratch = ScratchBytes(args.geometry.head_dim) * static_cast<size_t>(threads);
    KVT_CHECK(workspace.bytes >= scratch && reinterpret_cast<uintptr_t>(workspace.data) % 64 == 0,
              "workspace of ", workspace.bytes, " bytes, ", scratch, " needed");
    partials_ = reinterpret_cast<float*>(workspace.data + scratch);
    partial_floats_max_ = (workspace.bytes - scratch) / sizeof(float);
    int64_t rows = 0;
    for (const AttentionSegment& segment : args.segments) rows += segment.rows;
    const int64_t even = rows * kv_heads_ / (int64_t{kTasksPerThread} * threads);
    const int most = std::max(1, AttentionVectorsMax(args.geometry.head_dim) / group_);
    const int least = std::min(most, kBlockTokens);
    task_rows_ = static_cast<int>(std::clamp<int64_t>(even, least, most));
    if (task_rows_ > kBlockTokens) task_rows_ -= task_rows_ % kBlockTokens;
  }

  // Calls fn(segment, partials or null) for each segment in order.
  template <typename Fn>
  void ForEachSegment(Fn fn) const {
    size_t used = 0;
    for (const AttentionSegment& segment : args_.segments) {
      float* partials = nullptr;
      const int keys = segment.first_position + segment.rows;
      if (threads_ > 1 && keys > kAttentionRange && segment.rows * group_ <= kSplitVectorsMax) {
        const size_t floats = static_cast<size_t>(Ranges(keys)) * RangeStride(segment);
        if (used + floats <= partial_floats_max_) {
          partials = partials_ + used;
          used += floats;
        }
      }
      fn(segment, partials);
    }
  }

  // Calls fn(segment, kv_head, first row, end row, first key, end key, partials or null).
  template <typename Fn>
  void ForEachTask(Fn fn) const {
    ForEachSegment([&](const AttentionSegment& segment, float* partials) {
      const int keys = segment.first_position + segment.rows;
      for (int head = 0; head < kv_heads_; ++head) {
        if (partials != nullptr) {
          for (int begin = 0; begin < keys; begin += kAttentionRange) {
            fn(segment, head, 0, segment.rows, begin, std::min(keys, begin + kAttentionRange),
               partials);
          }
          continue;
        }
        for (int row = 0; row < segment.rows; row += task_rows_) {
          const int end = std::min(segment.rows, row + task_rows_);
          fn(segment, head, row, end, 0, segment.first_position + end, nullptr);
        }
      }
    });
  }

  // Floats between the partial results of two ranges of one query vector.
  [[nodiscard]] size_t RangeStride(const AttentionSegment& segment) const {
    return static_cast<size_t>(segment.rows) * static_cast<size_t>(args_.query_heads) *
           static_cast<size_t>(AttentionPartialFloats(args_.geometry.head_dim));
  }
  [[nodiscard]] size_t VectorOffset(const AttentionSegment& segment, int kv_head, int row) const {
    return static_cast<size_t>((kv_head * segment.rows + row) * group_) *
           static_cast<size_t>(AttentionPartialFloats(args_.geometry.head_dim));
  }
  [[nodiscard]] int group() const { return group_; }

 private:
  const PagedAttentionArgs& args_;
  const int threads_;
  const int kv_heads_;
  const int group_;
  int task_rows_ = 0;
  float* partials_ = nullptr;
  size_t partial_floats_max_ = 0;
};

int64_t TaskCost(int rows, int group, int first_position, int key_begin, int key_end) {
  const int64_t keys = key_end - key_begin;
  // Keys that a row sees on average: the last rows see them all.
  const int64_t first_keys = std::min<int64_t>(keys, std::max(0, first_position + 1 - key_begin));
  return (first_keys + keys) / 2 * rows * group + keys * kKeyCost;
}

void CheckArgs(const PagedAttentionArgs& args, int thread, int threads) {
  const Geometry& geometry = args.geometry;
  KVT_CHECK(geometry.head_dim % 32 == 0 && geometry.head_dim >= 32 && geometry.head_dim <= 256 &&
                geometry.kv_heads > 0 && geometry.layout == NamedLayout::kPairSwizzle,
            geometry.ToString());
  KVT_CHECK(args.query_heads > 0 && args.query_heads % geometry.kv_heads == 0 &&
                args.query_heads / geometry.kv_heads <= AttentionVectorsMax(geometry.head_dim),
            "query_heads=", args.query_heads, " kv_heads=", geometry.kv_heads);
  KVT_CHECK(thread >= 0 && thread < threads, "thread=", thread, " threads=", threads);
}

}  // namespace

size_t CpuPagedAttentionWorkspaceBytes(const AttentionLimits& limits) {
  const int head_dim = limits.geometry.head_dim;
  const auto threads = static_cast<size_t>(std::max(1, limits.threads));
  size_t partial_floats = 0;
  if (limits.context_tokens_max > kAttentionRange && limits.threads > 1) {
    partial_floats = static_cast<size_t>(Ranges(limits.context_tokens_max)) *
                     static_cast<size_t>(limits.decode_rows_max) *
                     static_cast<size_t>(limits.query_heads) *
                     static_cast<size_t>(AttentionPartialFloats(head_dim));
  }
  return threads * ScratchBytes(head_dim) + (partial_floats * sizeof(float) + 63) / 64 * 64;
}

void CpuPagedAttention(const PagedAttentionArgs& args, Workspace workspace, int thread,
                       int threads) {
  CheckArgs(args, thread, threads);
  const Plan plan(args, workspace, threads);
  const int group = plan.group();
  const int head_dim = args.geometry.head_dim;
  const bool bf16 = args.compute == ComputeType::kBf16;
  int64_t total = 0;
  plan.ForEachTask([&](const AttentionSegment& segment, int, int row, int end, int key_begin,
                       int key_end, float*) {
    total += TaskCost(end - row, group, segment.first_position + row, key_begin, key_end);
  });
  const AttentionIsa& isa = ChosenIsa(args.compute);
  AttentionTask task = {};
  task.head_dim = head_dim;
  task.group = group;
  task.scale = args.scale;
  task.slot_bytes = args.geometry.SlotBytes();
  task.q_stride = args.q_stride;
  task.out_stride = args.out_stride;
  task.out_bf16 = bf16;
  task.scratch = workspace.data + static_cast<size_t>(thread) * ScratchBytes(head_dim);
  int64_t before = 0;
  plan.ForEachTask([&](const AttentionSegment& segment, int kv_head, int row, int end,
                       int key_begin, int key_end, float* partials) {
    const int64_t cost =
        TaskCost(end - row, group, segment.first_position + row, key_begin, key_end);
    // A thread takes the tasks whose middle lies in its share of the total.
    const int64_t middle = before + cost / 2;
    before += cost;
    if (middle * threads / total != thread) return;
    const ptrdiff_t head_at = ptrdiff_t{kv_head} * group * head_dim;
    const ptrdiff_t out_at = ptrdiff_t{segment.first_row + row} * args.out_stride + head_at;
    task.rows = end - row;
    task.first_position = segment.first_position + row;
    task.key_begin = key_begin;
    task.key_end = key_end;
    task.ahead_end = segment.first_position + end;
    task.slots = args.slots + static_cast<size_t>(kv_head) * args.geometry.SliceBytes();
    task.blocks = segment.blocks;
    task.q = args.q + ptrdiff_t{segment.first_row + row} * args.q_stride + head_at;
    task.out = nullptr;
    task.partial = nullptr;
    if (partials != nullptr) {
      task.partial = partials +
                     static_cast<size_t>(key_begin / kAttentionRange) * plan.RangeStride(segment) +
                     plan.VectorOffset(segment, kv_head, row);
    } else {
      task.out = bf16 ? static_cast<void*>(static_cast<uint16_t*>(args.out) + out_at)
                      : static_cast<void*>(static_cast<float*>(args.out) + out_at);
    }
    isa.run(task);
  });
}

void CpuPagedAttentionCombine(const PagedAttentionArgs& args, Workspace workspace, int thread,
                              int threads) {
  CheckArgs(args, thread, threads);
  const Plan plan(args, workspace, threads);
  const int group = plan.group();
  const int head_dim = args.geometry.head_dim;
  const bool bf16 = args.compute == ComputeType::kBf16;
  const AttentionIsa& isa = ChosenIsa(args.compute);
  int vector = 0;
  plan.ForEachSegment([&](const AttentionSegment& segment, float* partials) {
    if (partials == nullptr) return;
    for (int row = 0; row < segment.rows; ++row) {
      for (int head = 0; head < args.query_heads; ++head) {
        if (vector++ % threads != thread) continue;
        const size_t offset = plan.VectorOffset(segment, head / group, row) +
                              static_cast<size_t>(head % group) *
                                  static_cast<size_t>(AttentionPartialFloats(head_dim));
        const ptrdiff_t at =
            ptrdiff_t{segment.first_row + row} * args.out_stride + ptrdiff_t{head} * head_dim;
        void* out = bf16 ? static_cast<void*>(static_cast<uint16_t*>(args.out) + at)
                         : static_cast<void*>(static_cast<float*>(args.out) + at);
        isa.combine({.head_dim = head_dim,
                     .ranges = Ranges(segment.first_position + row + 1),
                     .partial = partials + offset,
                     .range_stride = plan.RangeStride(segment),
                     .out = out,
                     .out_bf16 = bf16});
      }
    }
  });
}

bool CpuPagedAttentionIsSplit(const PagedAttentionArgs& args, Workspace workspace, int threads) {
  CheckArgs(args, 0, threads);
  bool split = false;
  Plan(args, workspace, threads).ForEachSegment([&](const AttentionSegment&, const float* partials) {
    split |= partials != nullptr;
  });
  return split;
}

absl::string_view CpuAttentionIsa(ComputeType compute) { return ChosenIsa(compute).name; }

int CpuAttentionIsaCount(ComputeType compute) { return Isas(compute).count; }

absl::string_view CpuAttentionIsaName(ComputeType compute, int index) {
  KVT_CHECK(index >= 0 && index < CpuAttentionIsaCount(compute), "index=", index);
  return Isas(compute).isas[static_cast<size_t>(index)]->name;
}

void CpuAttentionUseIsa(ComputeType compute, int index) {
  KVT_CHECK(index >= 0 && index < CpuAttentionIsaCount(compute), "index=", index);
  Isas(compute).chosen = index;
}

}  // namespace kvt
