// Paged attention for one task, written once over an instruction set `Arch` and included by the
// attention_isa_*.cc files only, each compiled for its own instruction set. Everything is in an
// unnamed namespace: no code of one instruction set is ever linked in place of another's.
//
// For each tile of 128 keys, for all query vectors of the task:
//   S = Q K^T     by panels of 64 keys: join the planes of K, convert them to operands once, then
//                 blocks of kRows x Columns registers, accumulated over channels in order
//   softmax       maximum, exp2, sums by lane; weights replace scores, as operands
//   O = a O + P V by panels of 64 keys of V, accumulated over keys in order
// An operand lane is an f32, or a pair of bf16. A panel stays in the first-level cache while all
// query vectors pass; their scores and accumulators stream through the second.
//   K panel [head_dim / kPack][64]      V panel [64 / kPack][head_dim]
// Every lane's sequence of operations depends on (position, tile) alone, never on the block of
// registers it is in. Work: 4 * head_dim flop a (query vector, key); bound by products in prefill
// and by reading the planes in decode.
//
// Arch supplies: V (16 floats), B (16 operands), Operand, kPack, kRowInRegisters, kRows and Columns(rows) (of a
// register block, columns in V), kExp2 (coefficients), and the functions used below.
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
struct Attention {
  using V = typename Arch::V;
  using B = typename Arch::B;
  using Operand = typename Arch::Operand;
  static constexpr int kPack = Arch::kPack;
  static constexpr int kRows = Arch::kRows;
  // Operands in a row of 32 bytes of K: two channels.
  static constexpr int kRowOperands = 2 / kPack;

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
    constexpr int kColumns = Arch::Columns(M);
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

  // Calls fn.operator()<M>(first vector) for register blocks that cover [begin, end).
  template <typename Fn>
  static void ForEachBlock(int begin, int end, Fn fn) {
    static_assert(kRows <= 6);
    int i = begin;
    for (; i + kRows <= end; i += kRows) fn.template operator()<kRows>(i);
    switch (end - i) {
      case 5:
        if constexpr (kRows > 5) fn.template operator()<5>(i);
        break;
      case 4:
        if constexpr (kRows > 4) fn.template operator()<4>(i);
        break;
      case 3:
        if constexpr (kRows > 3) fn.template operator()<3>(i);
        break;
      case 2: fn.template operator()<2>(i); break;
      case 1: fn.template operator()<1>(i); break;
      default: break;
    }
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

  // Fetches K or V (`half` 0 or 1) of a block that is needed soon.
  static void PrefetchHalf(const AttentionTask& task, int block, int half) {
    if (block * kBlock >= task.ahead_end) return;
    const Planes planes = BlockPlanes(task, block);
    const int bytes = kBlock * task.head_dim;
    for (int i = 0; i < bytes; i += 64) Arch::Prefetch(planes.base + half * bytes + i);
    if (planes.residual == nullptr) return;
    for (int i = 0; i < bytes; i += 64) Arch::Prefetch(planes.residual + half * bytes + i);
  }

  template <bool kTarget>
  static void ConvertKPlanes(Planes planes, int dim, Operand* to) {
    for (int row = 0; row < dim / 2; ++row) {
      B k[kRowOperands];
      Arch::template KOperands<kTarget>(planes.base + 32 * row, planes.residual + 32 * row, k);
      for (int j = 0; j < kRowOperands; ++j) {
        Arch::StoreOperands(to + (row * kRowOperands + j) * kPanel, k[j]);
      }
    }
  }
  static void ConvertK(const AttentionTask& task, const State& s, int block, int index) {
    const Planes planes = BlockPlanes(task, block);
    Operand* to = s.panel + index * 16;
    if (planes.residual != nullptr) {
      ConvertKPlanes<true>(planes, task.head_dim, to);
    } else {
      ConvertKPlanes<false>({planes.base, planes.base}, task.head_dim, to);
    }
  }

  template <bool kTarget>
  static void ConvertVPlanes(Planes planes, int dim, int limit, Operand* to) {
    for (int t = 0; t < kBlock; t += kPack) {
      for (int c = 0; c < dim; c += 32) {
        const int at = t * dim + c;
        B v[2];
        if (t + kPack <= limit) {
          Arch::template VOperands<kTarget>(planes.base + at, planes.residual + at, dim, v);
        } else {
          Arch::template LastVOperands<kTarget>(planes.base + at, planes.residual + at, limit - t, v);
        }
        Arch::StoreOperands(to + t / kPack * dim + c, v[0]);
        Arch::StoreOperands(to + t / kPack * dim + c + 16, v[1]);
      }
    }
  }
  // V of tokens from `limit` on reads as zero.
  static void ConvertV(const AttentionTask& task, const State& s, int block, int index, int limit) {
    const Planes planes = BlockPlanes(task, block);
    const int at = kBlock * task.head_dim;
    Operand* to = s.panel + index * (kBlock / kPack) * task.head_dim;
    if (planes.residual != nullptr) {
      ConvertVPlanes<true>({planes.base + at, planes.residual + at}, task.head_dim, limit, to);
    } else {
      ConvertVPlanes<false>({planes.base + at, planes.base + at}, task.head_dim, limit, to);
    }
  }

  // Tokens of a block that the task may read: beyond them slots may hold anything.
  static int BlockLimit(const AttentionTask& task, int block) {
    return MinInt(kBlock, task.key_end - block * kBlock);
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

  // Calls fn(row, end, key_vectors) for runs of rows that see the same key blocks of the tile.
  template <typename Fn>
  static void ForEachRun(const AttentionTask& task, int tile_begin, Fn fn) {
    int row = MaxInt(0, tile_begin - task.first_position);
    while (row < task.rows) {
      const int offset = task.first_position + row - tile_begin;  // >= 0
      const int key_vectors = MinInt(kTileBlocks, offset / kBlock + 1);
      const int end = key_vectors < kTileBlocks
                          ? MinInt(task.rows, row + kBlock - offset % kBlock)
                          : task.rows;
      fn(row, end, key_vectors);
      row = end;
    }
  }

  static void Scores(const AttentionTask& task, const State& s, int tile_begin, int panel) {
    const int first_block = (tile_begin + panel * kPanel) / kBlock;
    for (int i = 0; i < kPanelBlocks && (first_block + i) * kBlock < task.key_end; ++i) {
      PrefetchHalf(task, first_block + i + kTileBlocks, 0);
      ConvertK(task, s, first_block + i, i);
    }
    const int steps = task.head_dim / kPack;
    ForEachRun(task, tile_begin, [&](int row, int end, int key_vectors) {
      const int columns = MinInt(kPanelBlocks, key_vectors - panel * kPanelBlocks);
      if (columns <= 0) return;
      ForEachBlock(row * task.group, end * task.group, [&]<int M>(int first) {
        ProductColumns<M, false>(s.q + first * steps, steps, s.panel, kPanel, steps,
                                 s.scores + first * kAttentionTile + panel * kPanel,
                                 kAttentionTile, columns, nullptr);
      });
    });
  }

  // O = alpha O + P V for one panel; alpha only with the first.
  static void AccumulateRun(const AttentionTask& task, const State& s, int panel, int row, int end,
                            int columns) {
    const int dim = task.head_dim;
    const int steps = columns * kBlock / kPack;
    ForEachBlock(row * task.group, end * task.group, [&]<int M>(int first) {
      const Operand* weights = Weights(s, first) + panel * kPanel / kPack;
      float* out = s.range_out + first * dim;
      if (panel == 0) {
        ProductColumns<M, true>(weights, kAttentionTile, s.panel, dim, steps, out, dim, dim / 16,
                                s.alpha + first);
      } else {
        ProductColumns<M, true>(weights, kAttentionTile, s.panel, dim, steps, out, dim, dim / 16,
                                kOnes);
      }
    });
  }

  static void Outputs(const AttentionTask& task, const State& s, int tile_begin, int panel) {
    const int first_block = (tile_begin + panel * kPanel) / kBlock;
    for (int i = 0; i < kPanelBlocks && (first_block + i) * kBlock < task.key_end; ++i) {
      PrefetchHalf(task, first_block + i + kTileBlocks, 1);
      ConvertV(task, s, first_block + i, i, BlockLimit(task, first_block + i));
    }
    ForEachRun(task, tile_begin, [&](int row, int end, int key_vectors) {
      const int columns = MinInt(kPanelBlocks, key_vectors - panel * kPanelBlocks);
      if (columns <= 0) return;
      // Rows before `whole` mask keys of the last key block, which is in this panel if it is the
      // last one they see.
      const int block = tile_begin / kBlock + key_vectors - 1;
      const int whole = MinInt(end, (block + 1) * kBlock - 1 - task.first_position);
      const bool last_panel = key_vectors <= (panel + 1) * kPanelBlocks;
      if (last_panel && end - row > 1 && row < whole && HasNonFiniteV(task, block)) {
        for (; row < whole; ++row) {
          ConvertV(task, s, block, columns - 1, (task.first_position + row) % kBlock + 1);
          AccumulateRun(task, s, panel, row, row + 1, columns);
        }
        ConvertV(task, s, block, columns - 1, BlockLimit(task, block));
      }
      AccumulateRun(task, s, panel, row, end, columns);
    });
  }

  // --- One row (decode): planes go to registers and are used there, in the same order of operations,
  // --- so that memory is read evenly and nothing is converted to be stored.

  // Scores of M vectors against the 16 N keys of N blocks, all TARGET or all BASE.
  template <int M, int N, bool kTarget>
  static void RowScores(const AttentionTask& task, const State& s, int block, float* scores) {
    const int dim = task.head_dim;
    const int steps = dim / kPack;
    Planes planes[N];
    Planes ahead[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      planes[n] = BlockPlanes(task, block + n);
      ahead[n] = PlanesAhead(task, block + n);
    }
    V acc[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = Arch::Zero();
    }
    for (int row = 0; row < dim / 2; ++row) {
      B k[N][kRowOperands];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const uint8_t* base = planes[n].base + 32 * row;
        Arch::template KOperands<kTarget>(base, kTarget ? planes[n].residual + 32 * row : base, k[n]);
        Arch::Prefetch((row % 2 == 0 ? ahead[n].base : ahead[n].residual) + 32 * (row / 2 * 2));
      }
#pragma GCC unroll 2
      for (int j = 0; j < kRowOperands; ++j) {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const B q = Arch::Broadcast(s.q + m * steps + row * kRowOperands + j);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) acc[m][n] = Arch::Dot(acc[m][n], q, k[n][j]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) Arch::Store(scores + m * kAttentionTile + 16 * n, acc[m][n]);
    }
  }

  // The planes of the block one tile later, or the block's own where there is none; BASE twice.
  static Planes PlanesAhead(const AttentionTask& task, int block) {
    const int later = block + kTileBlocks;
    const Planes planes = BlockPlanes(task, later * kBlock < task.ahead_end ? later : block);
    return {planes.base, planes.residual != nullptr ? planes.residual : planes.base};
  }

  // O = alpha O + P V for M vectors, channels [16 first, 16 (first + N)), key blocks of a tile.
  template <int M, int N>
  static void RowOutputs(const AttentionTask& task, const State& s, int first_block, int blocks,
                         int first) {
    const int dim = task.head_dim;
    V acc[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        acc[m][n] = Arch::Mul(Arch::Load(s.range_out + m * dim + 16 * (first + n)),
                              Arch::Set(s.alpha[m]));
      }
    }
    const auto add = [&](int key, const B* v) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const B weight = Arch::Broadcast(Weights(s, m) + key / kPack);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[m][n] = Arch::Dot(acc[m][n], weight, v[n]);
      }
    };
    const auto block_outputs = [&]<bool kTarget>(const Planes& planes, const Planes& ahead, int key,
                                                 int limit) __attribute__((always_inline)) {
      for (int t = 0; t < kBlock; t += kPack) {
        const int at = t * dim + 16 * first;
        B v[N];
        const uint8_t* base = planes.base + at;
        const uint8_t* residual = kTarget ? planes.residual + at : base;
        if (t + kPack <= limit) [[likely]] {
#pragma GCC unroll 2
          for (int n = 0; n < N; n += 2) {
            Arch::template VOperands<kTarget>(base + 16 * n, residual + 16 * n, dim, v + n);
          }
        } else {
#pragma GCC unroll 2
          for (int n = 0; n < N; n += 2) {
            Arch::template LastVOperands<kTarget>(base + 16 * n, residual + 16 * n, limit - t, v + n);
          }
        }
        for (int i = 0; i < kPack; ++i) {
          Arch::Prefetch(ahead.base + at + i * dim);
          Arch::Prefetch(ahead.residual + at + i * dim);
        }
        add(key + t, v);
      }
    };
    const int v_begin = kBlock * dim;
    for (int i = 0; i < blocks; ++i) {
      const int block = first_block + i;
      Planes planes = BlockPlanes(task, block);
      Planes ahead = PlanesAhead(task, block);
      planes.base += v_begin;
      ahead.base += v_begin;
      ahead.residual += v_begin;
      if (planes.residual != nullptr) {
        planes.residual += v_begin;
        block_outputs.template operator()<true>(planes, ahead, i * kBlock, BlockLimit(task, block));
      } else {
        block_outputs.template operator()<false>(planes, ahead, i * kBlock, BlockLimit(task, block));
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        Arch::Store(s.range_out + m * dim + 16 * (first + n), acc[m][n]);
      }
    }
  }

  template <int M>
  static void RowTile(const AttentionTask& task, const State& s, int tile_begin) {
    const int first_block = tile_begin / kBlock;
    const int blocks = MinInt(kTileBlocks, (task.first_position - tile_begin) / kBlock + 1);
    constexpr int kAtOnce = M <= 2 ? 4 : M <= 4 ? 2 : 1;
    for (int i = 0; i < blocks;) {
      const int block = first_block + i;
      const bool target = task.blocks[block].residual != kSlotNone;
      bool together = i + kAtOnce <= blocks;
      for (int n = 1; n < kAtOnce && together; ++n) {
        together = (task.blocks[block + n].residual != kSlotNone) == target;
      }
      float* scores = s.scores + 16 * i;
      if (together) {
        target ? RowScores<M, kAtOnce, true>(task, s, block, scores)
               : RowScores<M, kAtOnce, false>(task, s, block, scores);
      } else {
        target ? RowScores<M, 1, true>(task, s, block, scores)
               : RowScores<M, 1, false>(task, s, block, scores);
      }
      i += together ? kAtOnce : 1;
    }
    Softmax(task, s, 0, M, blocks, tile_begin);
    int first = 0;
    for (; first + 4 <= task.head_dim / 16; first += 4) {
      RowOutputs<M, 4>(task, s, first_block, blocks, first);
    }
    if (first < task.head_dim / 16) RowOutputs<M, 2>(task, s, first_block, blocks, first);
  }

  static void Tile(const AttentionTask& task, const State& s, int tile_begin) {
    if constexpr (Arch::kRowInRegisters) {
      if (task.rows == 1) {
        switch (task.group) {
          case 1: return RowTile<1>(task, s, tile_begin);
          case 2: return RowTile<2>(task, s, tile_begin);
          case 3: return RowTile<3>(task, s, tile_begin);
          case 4: return RowTile<4>(task, s, tile_begin);
          case 5: return RowTile<5>(task, s, tile_begin);
          case 6: return RowTile<6>(task, s, tile_begin);
          default: break;  // more accumulators than registers
        }
      }
    }
    const bool two_panels = tile_begin + kPanel < task.key_end;
    Scores(task, s, tile_begin, 0);
    if (two_panels) Scores(task, s, tile_begin, 1);
    ForEachRun(task, tile_begin, [&](int row, int end, int key_vectors) {
      for (int first = row * task.group; first < end * task.group; first += 16) {
        Softmax(task, s, first, MinInt(16, end * task.group - first), key_vectors, tile_begin);
      }
    });
    Outputs(task, s, tile_begin, 0);
    if (two_panels) Outputs(task, s, tile_begin, 1);
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
