// Paged attention for one task, written once over an instruction set `Arch` and included by the
// attention_isa_*.cc files only, each compiled for its own instruction set. Everything is in an
// unnamed namespace: no code of one instruction set is ever linked in place of another's.
//
// For each tile of 128 keys: join the planes and convert K and V to operands once (an operand lane
// is an f32, or a pair of bf16), then for each register block of kRows query vectors
//   S = Q K^T     kRows x 16..128 lanes, accumulated over channels in order
//   softmax       maximum, exp2, sums by lane; weights stored as operands
//   O = a O + P V kRows x head_dim lanes, accumulated over keys in order
// Operands of a tile: K panels of 64 keys [head_dim / kPack][64], V [128 / kPack][head_dim].
// Every lane's sequence of operations depends on (position, tile) alone, never on the block of
// registers it is in. Work: 4 * head_dim flop a (query vector, key); bound by dot products in
// prefill and by reading the planes in decode.
//
// Arch supplies: V (16 floats), B (16 operands), Operand, kPack, kRows, kColumns (of a register
// block, in V), kExp2 (coefficients), and the functions used below.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention_task.h"

namespace kvt {
namespace {

constexpr float kLowest = -3.0e38f;  // a maximum before the first key
constexpr int kBlock = kBlockTokens;
constexpr int kTileBlocks = kAttentionTile / kBlock;
constexpr int kPanel = 64;  // keys of a K panel

inline int MinInt(int a, int b) { return a < b ? a : b; }
inline int MaxInt(int a, int b) { return a > b ? a : b; }

template <typename Arch>
struct Attention {
  using V = typename Arch::V;
  using B = typename Arch::B;
  using Operand = typename Arch::Operand;
  static constexpr int kPack = Arch::kPack;
  static constexpr int kRows = Arch::kRows;
  static constexpr int kColumns = Arch::kColumns;

  // Parts of the scratch.
  struct State {
    Operand* q;          // [vectors][head_dim / kPack]
    float* range_out;    // [vectors][head_dim]
    float* range_sum;    // [vectors][16]
    float* range_max;    // [vectors + 16]
    float* total_out;    // [vectors][head_dim]
    float* total_sum;    // [vectors + 16]
    float* total_max;    // [vectors + 16]
    Operand* k;          // [2 panels][head_dim / kPack][64]
    Operand* v;          // [128 / kPack][head_dim]
    float* scores;       // [kRows][128]
    Operand* weights;    // [kRows][128 / kPack]
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
    s.k = Carve<Operand>(at, kAttentionTile * dim / kPack);
    s.v = Carve<Operand>(at, kAttentionTile * dim / kPack);
    s.scores = Carve<float>(at, static_cast<size_t>(kRows) * kAttentionTile);
    s.weights = Carve<Operand>(at, static_cast<size_t>(kRows) * kAttentionTile / kPack);
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

  // c[i][j] = (scale ? scale[i] * c[i][j] : 0) + sum over k in order of a[i][k] * b[k][j]; i < M,
  // j < 16 N.
  template <int M, int N, bool kScaled>
  static void Product(const Operand* a, int a_stride, const Operand* b, int b_stride, int steps,
                      float* c, int c_stride, const float* scale) {
    V acc[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        if constexpr (kScaled) {
          acc[i][j] = Arch::Mul(Arch::Load(c + i * c_stride + 16 * j), Arch::Set(scale[i]));
        } else {
          acc[i][j] = Arch::Zero();
        }
      }
    }
    for (int k = 0; k < steps; ++k) {
      B column[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) column[j] = Arch::LoadOperands(b + k * b_stride + 16 * j);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const B row = Arch::Broadcast(a + i * a_stride + k);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) acc[i][j] = Arch::Dot(acc[i][j], row, column[j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) Arch::Store(c + i * c_stride + 16 * j, acc[i][j]);
    }
  }

  // The same for any number of columns (in V).
  template <int M, bool kScaled>
  static void ProductColumns(const Operand* a, int a_stride, const Operand* b, int b_stride,
                             int steps, float* c, int c_stride, int columns, const float* scale) {
    int j = 0;
    for (; j + kColumns <= columns; j += kColumns) {
      Product<M, kColumns, kScaled>(a, a_stride, b + 16 * j, b_stride, steps, c + 16 * j, c_stride,
                                    scale);
    }
    switch (columns - j) {
      case 3:
        if constexpr (kColumns > 3) {
          Product<M, 3, kScaled>(a, a_stride, b + 16 * j, b_stride, steps, c + 16 * j, c_stride,
                                 scale);
        }
        break;
      case 2:
        if constexpr (kColumns > 2) {
          Product<M, 2, kScaled>(a, a_stride, b + 16 * j, b_stride, steps, c + 16 * j, c_stride,
                                 scale);
        }
        break;
      case 1:
        Product<M, 1, kScaled>(a, a_stride, b + 16 * j, b_stride, steps, c + 16 * j, c_stride,
                               scale);
        break;
      default: break;
    }
  }

  // Scores of M vectors become weights (operands) and `alpha`, by which what was summed before
  // shrinks. `valid[i]` keys of the last of `key_vectors` are not masked.
  template <int M>
  static void Softmax(const State& s, int first, int key_vectors, const int* valid, float* alpha) {
    alignas(64) float peak[16];
    Arch::Store(peak, Arch::Set(kLowest));
    for (int i = 0; i < M; ++i) {
      float* scores = s.scores + i * kAttentionTile;
      float* last = scores + 16 * (key_vectors - 1);
      const V masked = Arch::Select(valid[i], Arch::Load(last), Arch::Set(-__builtin_inff()));
      V maximum = masked;
      for (int j = 0; j < key_vectors - 1; ++j) maximum = Arch::Max(maximum, Arch::Load(scores + 16 * j));
      if (valid[i] != 16) Arch::Store(last, masked);
      peak[i] = Arch::ReduceMax(maximum);
    }
    const V before = Arch::LoadUnaligned(s.range_max + first);
    const V now = Arch::Max(before, Arch::Load(peak));
    alignas(64) float now_lanes[16];
    Arch::Store(now_lanes, now);
    Arch::Store(alpha, Exp2(Arch::Sub(before, now)));
    for (int i = 0; i < M; ++i) s.range_max[first + i] = now_lanes[i];
    for (int i = 0; i < M; ++i) {
      const float* scores = s.scores + i * kAttentionTile;
      Operand* weights = s.weights + i * (kAttentionTile / kPack);
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

  // One tile for vectors [first, first + M), all of which see `key_vectors` key blocks of it.
  template <int M>
  static void RegisterBlock(const AttentionTask& task, const State& s, int first, int key_vectors,
                            int tile_begin) {
    const int dim = task.head_dim;
    const int steps = dim / kPack;
    const Operand* q = s.q + first * steps;
    for (int panel = 0; 4 * panel < key_vectors; ++panel) {
      ProductColumns<M, false>(q, steps, s.k + panel * steps * kPanel, kPanel, steps,
                               s.scores + panel * kPanel, kAttentionTile,
                               MinInt(4, key_vectors - 4 * panel), nullptr);
    }
    int valid[M];
    const int last_begin = tile_begin + kBlock * (key_vectors - 1);
    for (int i = 0; i < M; ++i) {
      const int position = task.first_position + (first + i) / task.group;
      valid[i] = MinInt(kBlock, position + 1 - last_begin);
    }
    alignas(64) float alpha[16];
    Softmax<M>(s, first, key_vectors, valid, alpha);
    ProductColumns<M, true>(s.weights, kAttentionTile / kPack, s.v, dim,
                            key_vectors * kBlock / kPack, s.range_out + first * dim, dim, dim / 16,
                            alpha);
  }

  static void Vectors(const AttentionTask& task, const State& s, int begin, int end,
                      int key_vectors, int tile_begin) {
    int i = begin;
    for (; i + kRows <= end; i += kRows) {
      RegisterBlock<kRows>(task, s, i, key_vectors, tile_begin);
    }
    static_assert(kRows <= 6);
    switch (end - i) {
      case 5:
        if constexpr (kRows > 5) RegisterBlock<5>(task, s, i, key_vectors, tile_begin);
        break;
      case 4:
        if constexpr (kRows > 4) RegisterBlock<4>(task, s, i, key_vectors, tile_begin);
        break;
      case 3:
        if constexpr (kRows > 3) RegisterBlock<3>(task, s, i, key_vectors, tile_begin);
        break;
      case 2: RegisterBlock<2>(task, s, i, key_vectors, tile_begin); break;
      case 1: RegisterBlock<1>(task, s, i, key_vectors, tile_begin); break;
      default: break;
    }
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

  static void ConvertV(const AttentionTask& task, const State& s, int block, int index, int limit) {
    const Planes planes = BlockPlanes(task, block);
    const int v_begin = kBlock * task.head_dim;
    Operand* to = s.v + index * (kBlock / kPack) * task.head_dim;
    if (planes.residual != nullptr) {
      Arch::template ConvertV<true>(planes.base + v_begin, planes.residual + v_begin,
                                    task.head_dim, limit, to);
    } else {
      Arch::template ConvertV<false>(planes.base + v_begin, planes.base + v_begin, task.head_dim, limit, to);
    }
  }

  // Converts the key blocks of one tile; V of keys from key_end on reads as zero (their slots may
  // hold anything). Fetches the next tile ahead.
  static void ConvertTile(const AttentionTask& task, const State& s, int tile_begin) {
    const int keys = MinInt(kAttentionTile, task.key_end - tile_begin);
    const int steps = task.head_dim / kPack;
    const size_t plane_bytes = size_t{2} * kBlock * static_cast<size_t>(task.head_dim);
    for (int index = 0; index * kBlock < keys; ++index) {
      const int block = tile_begin / kBlock + index;
      if ((block + kTileBlocks) * kBlock < task.key_end) {
        const Planes ahead = BlockPlanes(task, block + kTileBlocks);
        for (size_t byte = 0; byte < plane_bytes; byte += 64) Arch::Prefetch(ahead.base + byte);
        if (ahead.residual != nullptr) {
          for (size_t byte = 0; byte < plane_bytes; byte += 64) {
            Arch::Prefetch(ahead.residual + byte);
          }
        }
      }
      const Planes planes = BlockPlanes(task, block);
      Operand* k = s.k + (index / 4) * steps * kPanel + (index % 4) * 16;
      if (planes.residual != nullptr) {
        Arch::template ConvertK<true>(planes.base, planes.residual, task.head_dim, k, kPanel);
      } else {
        Arch::template ConvertK<false>(planes.base, planes.base, task.head_dim, k, kPanel);
      }
      ConvertV(task, s, block, index, MinInt(kBlock, keys - index * kBlock));
    }
  }

  // Whether a V of the block is not finite. Then 0 * V of a masked key is not 0, and rows that mask
  // some of the block get their own copy of it.
  static bool HasNonFiniteV(const AttentionTask& task, int block) {
    const Planes planes = BlockPlanes(task, block);
    const int bytes = kBlock * task.head_dim;
    bool found = false;
    for (int i = bytes; i < 2 * bytes; ++i) found |= (planes.base[i] & 0x7c) == 0x7c;
    return found;
  }

  static void Tile(const AttentionTask& task, const State& s, int tile_begin) {
    ConvertTile(task, s, tile_begin);
    int row = MaxInt(0, tile_begin - task.first_position);
    while (row < task.rows) {
      const int offset = task.first_position + row - tile_begin;  // >= 0
      const int key_vectors = MinInt(kTileBlocks, offset / kBlock + 1);
      // Rows up to `end` see the same key blocks; those before `whole` mask some keys of the last.
      const int end = key_vectors < kTileBlocks
                          ? MinInt(task.rows, row + kBlock - offset % kBlock)
                          : task.rows;
      const int whole_row = tile_begin + kBlock * key_vectors - 1 - task.first_position;
      const int block = tile_begin / kBlock + key_vectors - 1;
      if (end - row > 1 && row < whole_row && HasNonFiniteV(task, block)) {
        for (; row < MinInt(end, whole_row); ++row) {
          ConvertV(task, s, block, key_vectors - 1, (task.first_position + row) % kBlock + 1);
          Vectors(task, s, row * task.group, (row + 1) * task.group, key_vectors, tile_begin);
        }
        ConvertV(task, s, block, key_vectors - 1,
                 MinInt(kBlock, task.key_end - block * kBlock));
      }
      Vectors(task, s, row * task.group, end * task.group, key_vectors, tile_begin);
      row = end;
    }
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

  static void Run(const AttentionTask& task) {
    const State s = Place(task);
    const int dim = task.head_dim;
    const int vectors = task.rows * task.group;
    const float log2e = 1.44269504088896340736f;
    const V scale = Arch::Set(task.scale * log2e);
    for (int i = 0; i < vectors; ++i) {
      const float* from = task.q + (i / task.group) * task.q_stride + (i % task.group) * dim;
      for (int d = 0; d < dim; d += 32) {
        Arch::StoreWeights(s.q + (i * dim + d) / kPack,
                           Arch::Mul(Arch::LoadUnaligned(from + d), scale),
                           Arch::Mul(Arch::LoadUnaligned(from + d + 16), scale));
      }
    }
    const auto clear = [](float* at, int count, float value) {
      for (int i = 0; i < count; i += 16) Arch::Store(at + i, Arch::Set(value));
    };
    const int padded = (vectors + 15) / 16 * 16;
    clear(s.total_max, padded, kLowest);
    clear(s.total_sum, padded, 0.0f);
    clear(s.total_out, vectors * dim, 0.0f);
    for (int range = task.key_begin; range < task.key_end; range += kAttentionRange) {
      clear(s.range_max, padded, kLowest);
      clear(s.range_sum, vectors * 16, 0.0f);
      clear(s.range_out, vectors * dim, 0.0f);
      const int range_end = MinInt(task.key_end, range + kAttentionRange);
      for (int tile = range; tile < range_end; tile += kAttentionTile) Tile(task, s, tile);
      for (int i = MaxInt(0, range - task.first_position) * task.group; i < vectors; ++i) {
        const float sum = Arch::ReduceAdd(Arch::Load(s.range_sum + i * 16));
        if (task.out == nullptr) {
          float* to = task.partial + i * AttentionPartialFloats(dim);
          to[0] = s.range_max[i];
          to[1] = sum;
          for (int d = 0; d < dim; d += 16) Arch::Store(to + 16 + d, Arch::Load(s.range_out + i * dim + d));
        } else {
          Merge(dim, s.range_max[i], sum, s.range_out + i * dim, s.total_max + i, s.total_sum + i,
                s.total_out + i * dim);
        }
      }
    }
    if (task.out == nullptr) return;
    for (int i = 0; i < vectors; ++i) {
      const ptrdiff_t at = (i / task.group) * task.out_stride + (i % task.group) * dim;
      void* to = task.out_bf16 ? static_cast<void*>(static_cast<uint16_t*>(task.out) + at)
                               : static_cast<void*>(static_cast<float*>(task.out) + at);
      WriteOut(dim, s.total_sum[i], s.total_out + i * dim, to, task.out_bf16);
    }
  }

  static void Combine(const AttentionCombineTask& task) {
    alignas(64) float total_out[256];
    for (int d = 0; d < task.head_dim; d += 16) Arch::Store(total_out + d, Arch::Zero());
    float total_max = kLowest;
    float total_sum = 0.0f;
    for (int range = 0; range < task.ranges; ++range) {
      const float* partial = task.partial + static_cast<size_t>(range) * task.range_stride;
      Merge(task.head_dim, partial[0], partial[1], partial + 16, &total_max, &total_sum, total_out);
    }
    WriteOut(task.head_dim, total_sum, total_out, task.out, task.out_bf16);
  }
};

}  // namespace
}  // namespace kvt
