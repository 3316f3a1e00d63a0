// Attention of one row (decode): planes go to registers and are used there, in the same order of
// operations as in attention_impl.h, so that memory is read evenly and nothing is converted to be
// stored. For at most 6 query vectors, so that their accumulators fit the registers. Reads
// 2 * head_dim bytes a key and plane; bound by that from memory, in cache by joining and converting.
#pragma once

#include "kernels/cpu/attention_core_impl.h"

namespace kvt {
namespace {

template <typename Arch>
struct AttentionRow {
  using Core = AttentionCore<Arch>;
  using V = typename Arch::V;
  using B = typename Arch::B;
  using Operand = typename Arch::Operand;
  using State = typename Core::State;
  using Planes = typename Core::Planes;
  static constexpr int kPack = Arch::kPack;
  // Operands in a row of 32 bytes of K: two channels.
  static constexpr int kRowOperands = 2 / kPack;

  // Scores of M vectors against the 16 N keys of N blocks, all TARGET or all BASE.
  template <int M, int N, bool kTarget>
  static void RowScores(const AttentionTask& task, const State& s, int block, float* scores) {
    const int dim = task.head_dim;
    const int steps = dim / kPack;
    Planes planes[N];
    Planes ahead[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      planes[n] = Core::BlockPlanes(task, block + n);
      ahead[n] = Core::PlanesAhead(task, block + n);
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
        const B weight = Arch::Broadcast(Core::Weights(s, m) + key / kPack);
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
      Planes planes = Core::BlockPlanes(task, block);
      Planes ahead = Core::PlanesAhead(task, block);
      planes.base += v_begin;
      ahead.base += v_begin;
      ahead.residual += v_begin;
      if (planes.residual != nullptr) {
        planes.residual += v_begin;
        block_outputs.template operator()<true>(planes, ahead, i * kBlock, Core::BlockLimit(task, block));
      } else {
        block_outputs.template operator()<false>(planes, ahead, i * kBlock, Core::BlockLimit(task, block));
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
    Core::Softmax(task, s, 0, M, blocks, tile_begin);
    int first = 0;
    for (; first + 4 <= task.head_dim / 16; first += 4) {
      RowOutputs<M, 4>(task, s, first_block, blocks, first);
    }
    if (first < task.head_dim / 16) RowOutputs<M, 2>(task, s, first_block, blocks, first);
  }
};

}  // namespace
}  // namespace kvt
