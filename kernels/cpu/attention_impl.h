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

#include "kernels/cpu/attention_core_impl.h"
#include "kernels/cpu/attention_row_impl.h"
#include "kernels/cpu/attention_task.h"

namespace kvt {
namespace {

template <typename Arch>
struct Attention {
  using Core = AttentionCore<Arch>;
  using V = typename Arch::V;
  using B = typename Arch::B;
  using Operand = typename Arch::Operand;
  using State = typename Core::State;
  using Planes = typename Core::Planes;
  static constexpr int kPack = Arch::kPack;
  static constexpr int kRows = Arch::kRows;
  // Operands in a row of 32 bytes of K: two channels.
  static constexpr int kRowOperands = 2 / kPack;

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

  // Fetches K or V (`half` 0 or 1) of a block that is needed soon.
  static void PrefetchHalf(const AttentionTask& task, int block, int half) {
    if (block * kBlock >= task.ahead_end) return;
    const Planes planes = Core::BlockPlanes(task, block);
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
    const Planes planes = Core::BlockPlanes(task, block);
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
    const Planes planes = Core::BlockPlanes(task, block);
    const int at = kBlock * task.head_dim;
    Operand* to = s.panel + index * (kBlock / kPack) * task.head_dim;
    if (planes.residual != nullptr) {
      ConvertVPlanes<true>({planes.base + at, planes.residual + at}, task.head_dim, limit, to);
    } else {
      ConvertVPlanes<false>({planes.base + at, planes.base + at}, task.head_dim, limit, to);
    }
  }

  // Whether a V of the block is not finite. Then 0 * V of a masked key is not 0, and rows that mask
  // some of the block get their own copy of it.
  static bool HasNonFiniteV(const AttentionTask& task, int block) {
    const Planes planes = Core::BlockPlanes(task, block);
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
      const Operand* weights = Core::Weights(s, first) + panel * kPanel / kPack;
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
      ConvertV(task, s, first_block + i, i, Core::BlockLimit(task, first_block + i));
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
        ConvertV(task, s, block, columns - 1, Core::BlockLimit(task, block));
      }
      AccumulateRun(task, s, panel, row, end, columns);
    });
  }

  static void Tile(const AttentionTask& task, const State& s, int tile_begin) {
    if constexpr (Arch::kRowInRegisters) {
      if (task.rows == 1) return AttentionRow<Arch>::Tile(task, s, tile_begin);
    }
    const bool two_panels = tile_begin + kPanel < task.key_end;
    Scores(task, s, tile_begin, 0);
    if (two_panels) Scores(task, s, tile_begin, 1);
    ForEachRun(task, tile_begin, [&](int row, int end, int key_vectors) {
      for (int first = row * task.group; first < end * task.group; first += 16) {
        Core::Softmax(task, s, first, MinInt(16, end * task.group - first), key_vectors, tile_begin);
      }
    });
    Outputs(task, s, tile_begin, 0);
    if (two_panels) Outputs(task, s, tile_begin, 1);
  }

  static void Run(const AttentionTask& task) {
    const State s = Core::Place(task);
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
          Core::Merge(dim, s.range_max[i], sum, s.range_out + i * dim, s.total_max + i, s.total_sum + i,
                s.total_out + i * dim);
        }
      }
    }
    if (task.out == nullptr) return;
    for (int i = 0; i < vectors; ++i) {
      const ptrdiff_t at = (i / task.group) * task.out_stride + (i % task.group) * dim;
      void* to = task.out_bf16 ? static_cast<void*>(static_cast<uint16_t*>(task.out) + at)
                               : static_cast<void*>(static_cast<float*>(task.out) + at);
      Core::WriteOut(dim, s.total_sum[i], s.total_out + i * dim, to, task.out_bf16);
    }
  }

  static void Combine(const AttentionCombineTask& task) {
    alignas(64) float total_out[256];
    for (int d = 0; d < task.head_dim; d += 16) Arch::Store(total_out + d, Arch::Zero());
    float total_max = kLowest;
    float total_sum = 0.0f;
    for (int range = 0; range < task.ranges; ++range) {
      const float* partial = task.partial + static_cast<size_t>(range) * task.range_stride;
      Core::Merge(task.head_dim, partial[0], partial[1], partial + 16, &total_max, &total_sum, total_out);
    }
    Core::WriteOut(task.head_dim, total_sum, total_out, task.out, task.out_bf16);
  }
};

}  // namespace
}  // namespace kvt
