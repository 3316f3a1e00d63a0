// Attention of one row (decode): planes go to registers and are used there, in the same order of
// operations as in attention_impl.h, so that memory is read evenly and nothing is converted to be
// stored. Up to 6 query vectors go at once, so that their accumulators fit the registers; more pass
// over the tile again, which is in cache by then. Reads 2 * head_dim bytes a key and plane; bound by
// that from memory, in cache by joining and converting.
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

  // Scores of vectors [vector, vector + M) against the 16 N keys of N blocks, all TARGET or all BASE.
  template <int M, int N, bool kTarget>
  static void RowScores(const AttentionTask& task, const State& s, int vector, int block,
                        float* scores) {
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
          const B q = Arch::Broadcast(s.q + (vector + m) * steps + row * kRowOperands + j);
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

  // O = alpha O + P V for vectors [vector, vector + M), channels [16 first, 16 (first + N)), key
  // blocks of a tile.
  template <int M, int N>
  static void RowOutputs(const AttentionTask& task, const State& s, int vector, int first_block,
                         int blocks, int first) {
    const int dim = task.head_dim;
    float* out = s.range_out + vector * dim + 16 * first;
    V acc[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        acc[m][n] = Arch::Mul(Arch::Load(out + m * dim + 16 * n), Arch::Set(s.alpha[vector + m]));
      }
    }
    const auto add = [&](int key, const B* v) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const B weight = Arch::Broadcast(Core::Weights(s, vector + m) + key / kPack);
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
        Arch::Store(out + m * dim + 16 * n, acc[m][n]);
      }
    }
  }

  template <int M>
  static void Scores(const AttentionTask& task, const State& s, int vector, int first_block,
                     int blocks) {
    constexpr int kAtOnce = M <= 2 ? 4 : M <= 4 ? 2 : 1;
    for (int i = 0; i < blocks;) {
      const int block = first_block + i;
      const bool target = task.blocks[block].residual != kSlotNone;
      bool together = i + kAtOnce <= blocks;
      for (int n = 1; n < kAtOnce && together; ++n) {
        together = (task.blocks[block + n].residual != kSlotNone) == target;
      }
      float* scores = s.scores + vector * kAttentionTile + 16 * i;
      if (together) {
        target ? RowScores<M, kAtOnce, true>(task, s, vector, block, scores)
               : RowScores<M, kAtOnce, false>(task, s, vector, block, scores);
      } else {
        target ? RowScores<M, 1, true>(task, s, vector, block, scores)
               : RowScores<M, 1, false>(task, s, vector, block, scores);
      }
      i += together ? kAtOnce : 1;
    }
  }

  template <int M>
  static void Outputs(const AttentionTask& task, const State& s, int vector, int first_block,
                      int blocks) {
    int first = 0;
    for (; first + 4 <= task.head_dim / 16; first += 4) {
      RowOutputs<M, 4>(task, s, vector, first_block, blocks, first);
    }
    if (first < task.head_dim / 16) RowOutputs<M, 2>(task, s, vector, first_block, blocks, first);
  }

  // Calls fn.operator()<M>(first vector) for passes that cover the group, as equal as can be.
  template <typename Fn>
  static void ForEachPass(int group, Fn fn) {
    int passes = (group + 5) / 6;
    for (int vector = 0; vector < group; --passes) {
      const int m = (group - vector + passes - 1) / passes;
      switch (m) {
        case 1: fn.template operator()<1>(vector); break;
        case 2: fn.template operator()<2>(vector); break;
        case 3: fn.template operator()<3>(vector); break;
        case 4: fn.template operator()<4>(vector); break;
        case 5: fn.template operator()<5>(vector); break;
        default: fn.template operator()<6>(vector); break;
      }
      vector += m;
    }
  }

  static void Tile(const AttentionTask& task, const State& s, int tile_begin) {
    const int first_block = tile_begin / kBlock;
    const int blocks = MinInt(kTileBlocks, (task.first_position - tile_begin) / kBlock + 1);
    ForEachPass(task.group, [&]<int M>(int vector) {
      Scores<M>(task, s, vector, first_block, blocks);
    });
    for (int first = 0; first < task.group; first += 16) {
      Core::Softmax(task, s, first, MinInt(16, task.group - first), blocks, tile_begin);
    }
    ForEachPass(task.group, [&]<int M>(int vector) {
      Outputs<M>(task, s, vector, first_block, blocks);
    });
  }
};

}  // namespace
}  // namespace kvt
