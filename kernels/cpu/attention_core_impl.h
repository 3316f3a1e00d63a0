// What both forms of paged attention share (attention_impl.h, attention_row_impl.h): a task's scratch,
// exp2, the softmax of a tile, access to planes, and how ranges are merged. Included by the
// attention_isa_*.cc files only; in an unnamed namespace, as those files differ in instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention_task.h"

namespace kvt {
namespace {

constexpr float kLowest = -3.0e38f;  // a maximum before the first key
constexpr int kBlock = kBlockTokens;
constexpr int kTileBlocks = kAttentionTile / kBlock;
constexpr int kPanel = 64;  // keys
constexpr int kPanelBlocks = kPanel / kBlock;

alignas(64) constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

inline int MinInt(int a, int b) { return a < b ? a : b; }
inline int MaxInt(int a, int b) { return a > b ? a : b; }
template <typename Arch>
struct AttentionCore {
  using V = typename Arch::V;
  using B = typename Arch::B;
  using Operand = typename Arch::Operand;
  static constexpr int kPack = Arch::kPack;

  // Parts of the scratch.
  struct State {
    Operand* q;          // [vectors][head_dim / kPack]
    float* range_out;    // [vectors][head_dim]
    float* range_sum;    // [vectors][16]
    float* range_max;    // [vectors + 16]
    float* total_out;    // [vectors][head_dim]
    float* total_sum;    // [vectors + 16]
    float* total_max;    // [vectors + 16]
    Operand* panel;      // K [head_dim / kPack][64], then V [64 / kPack][head_dim]
    float* alpha;        // [vectors + 16]: by what the accumulators shrink at this tile
    float* scores;       // [vectors][128]; weights take their place, operands from the row's start
  };

  template <typename T>
  static T* Carve(uint8_t*& at, size_t count) {
    T* part = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 64;
    return part;
  }

  static State Place(const AttentionTask& task) {
    const auto vectors = static_cast<size_t>(AttentionVectorsMax(task.head_dim));
    const auto dim = static_cast<size_t>(task.head_dim);
    uint8_t* at = task.scratch;
    State s;
    s.q = Carve<Operand>(at, vectors * dim / kPack);
    s.range_out = Carve<float>(at, vectors * dim);
    s.range_sum = Carve<float>(at, vectors * 16);
    s.range_max = Carve<float>(at, vectors + 16);
    s.total_out = Carve<float>(at, vectors * dim);
    s.total_sum = Carve<float>(at, vectors + 16);
    s.total_max = Carve<float>(at, vectors + 16);
    s.panel = Carve<Operand>(at, kPanel * dim / kPack);
    s.alpha = Carve<float>(at, vectors + 16);
    s.scores = Carve<float>(at, vectors * kAttentionTile);
    return s;
  }

  // 2^x for x <= 0, relative error below Arch's polynomial (see the Arch); exactly 0 below -64 (a
  // weight that no f32 sum can see, and no product of it is subnormal), exactly 1 at 0; NaN is kept.
  static V Exp2(V x) {
    const V n = Arch::Round(x);
    const V f = Arch::Sub(x, n);
    constexpr int kDegree = static_cast<int>(sizeof(Arch::kExp2) / sizeof(float));
    V p = Arch::Set(Arch::kExp2[kDegree - 1]);
#pragma GCC unroll 8
    for (int i = kDegree - 2; i >= 0; --i) p = Arch::Fma(p, f, Arch::Set(Arch::kExp2[i]));
    p = Arch::Fma(p, f, Arch::Set(1.0f));
    return Arch::ScaleOrZero(p, n, x, -64.0f);
  }

  // Scores of vectors [first, first + count), count <= 16, become weights, and alpha is set. All see
  // `key_vectors` key blocks of the tile.
  static void Softmax(const AttentionTask& task, const State& s, int first, int count,
                      int key_vectors, int tile_begin) {
    const int last_begin = tile_begin + kBlock * (key_vectors - 1);
    alignas(64) float peak[16];
    Arch::Store(peak, Arch::Set(kLowest));
    for (int i = 0; i < count; ++i) {
      float* scores = s.scores + (first + i) * kAttentionTile;
      float* last = scores + 16 * (key_vectors - 1);
      const int position = task.first_position + (first + i) / task.group;
      const int valid = MinInt(kBlock, position + 1 - last_begin);
      V maximum = Arch::Load(last);
      if (valid != kBlock) {
        maximum = Arch::Select(valid, maximum, Arch::Set(-__builtin_inff()));
        Arch::Store(last, maximum);
      }
      for (int j = 0; j < key_vectors - 1; ++j) {
        maximum = Arch::Max(maximum, Arch::Load(scores + 16 * j));
      }
      peak[i] = Arch::ReduceMax(maximum);
    }
    const V before = Arch::LoadUnaligned(s.range_max + first);
    const V now = Arch::Max(before, Arch::Load(peak));
    alignas(64) float now_lanes[16];
    alignas(64) float alpha[16];
    Arch::Store(now_lanes, now);
    Arch::Store(alpha, Exp2(Arch::Sub(before, now)));
    for (int i = 0; i < count; ++i) {
      s.range_max[first + i] = now_lanes[i];
      s.alpha[first + i] = alpha[i];
    }
    for (int i = 0; i < count; ++i) {
      const float* scores = s.scores + (first + i) * kAttentionTile;
      Operand* weights = Weights(s, first + i);
      const V top = Arch::Set(now_lanes[i]);
      float* sums = s.range_sum + (first + i) * 16;
      V sum = Arch::Mul(Arch::Load(sums), Arch::Set(alpha[i]));
      int j = 0;
      for (; j + 2 <= key_vectors; j += 2) {
        const V p0 = Exp2(Arch::Sub(Arch::Load(scores + 16 * j), top));
        const V p1 = Exp2(Arch::Sub(Arch::Load(scores + 16 * j + 16), top));
        sum = Arch::Add(Arch::Add(sum, p0), p1);
        Arch::StoreWeights(weights + 16 * j / kPack, p0, p1);
      }
      if (j < key_vectors) {
        const V p0 = Exp2(Arch::Sub(Arch::Load(scores + 16 * j), top));
        sum = Arch::Add(sum, p0);
        Arch::StoreWeights(weights + 16 * j / kPack, p0);
      }
      Arch::Store(sums, sum);
    }
  }

  static Operand* Weights(const State& s, int vector) {
    return reinterpret_cast<Operand*>(s.scores + vector * kAttentionTile);
  }

  struct Planes {
    const uint8_t* base;
    const uint8_t* residual;  // null: BASE
  };
  static Planes BlockPlanes(const AttentionTask& task, int block) {
    const SlotPair pair = task.blocks[block];
    return {task.slots + pair.base * task.slot_bytes,
            pair.residual == kSlotNone ? nullptr : task.slots + pair.residual * task.slot_bytes};
  }

  // The planes of the block one tile later, or the block's own where there is none; BASE twice.
  static Planes PlanesAhead(const AttentionTask& task, int block) {
    const int later = block + kTileBlocks;
    const Planes planes = BlockPlanes(task, later * kBlock < task.ahead_end ? later : block);
    return {planes.base, planes.residual != nullptr ? planes.residual : planes.base};
  }

  // Tokens of a block that the task may read: beyond them slots may hold anything.
  static int BlockLimit(const AttentionTask& task, int block) {
    return MinInt(kBlock, task.key_end - block * kBlock);
  }

  // total = total + range, by their maxima; `range_*` of one vector. The same for partial results.
  static void Merge(int dim, float range_max, float range_sum, const float* range_out,
                    float* total_max, float* total_sum, float* total_out) {
    const float top = *total_max < range_max ? range_max : *total_max;
    const V a = Exp2(Arch::Sub(Arch::Set(*total_max), Arch::Set(top)));
    const V b = Exp2(Arch::Sub(Arch::Set(range_max), Arch::Set(top)));
    *total_max = top;
    *total_sum = Arch::First(
        Arch::Fma(Arch::Set(range_sum), b, Arch::Mul(Arch::Set(*total_sum), a)));
    for (int d = 0; d < dim; d += 16) {
      Arch::Store(total_out + d, Arch::Fma(Arch::Load(range_out + d), b,
                                           Arch::Mul(Arch::Load(total_out + d), a)));
    }
  }

  static void WriteOut(int dim, float sum, const float* total_out, void* out, bool bf16) {
    const V inverse = Arch::Div(Arch::Set(1.0f), Arch::Set(sum));
    for (int d = 0; d < dim; d += 16) {
      const V value = Arch::Mul(Arch::Load(total_out + d), inverse);
      if (bf16) {
        Arch::StoreBf16(static_cast<uint16_t*>(out) + d, value);
      } else {
        Arch::StoreUnaligned(static_cast<float*>(out) + d, value);
      }
    }
  }
};

}  // namespace
}  // namespace kvt
