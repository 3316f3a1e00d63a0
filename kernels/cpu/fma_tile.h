// Register tiles of fma_matmul_*.cc, over a `Simd` that the including file defines:
//   V, kWidth, kRowsMax (tile rows), kBlockVectors (vectors of a tile's columns),
//   kWideAccumulatorsMax (up to so many accumulators two blocks go side by side),
//   Zero, Set, Load, Store, MaskLoad, MaskStore, Broadcast, Fma, Add, Mul, Div, Negate,
//   LoadPair (widen the two channels of a vector of bf16 pairs), Exp, StoreBf16.
// A block of 32 columns is walked in parts of kWidth * kBlockVectors columns. A row tile lies in f32
// as pieces of kChunk channels, [chunk][row][kTileStride].
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/fma_matmul.h"

namespace kvt {
namespace {

constexpr int kChunk = 512;         // channels of one piece of a row tile
constexpr int kTileStride = 528;    // floats between rows of a piece, off the 4 KiB alias
constexpr int kPart = Simd::kWidth * Simd::kBlockVectors;
constexpr int kParts = kFmaBlockColumns / kPart;

inline int MinInt(int a, int b) { return a < b ? a : b; }
inline int EvenChannels(int channels) { return (channels + 1) & ~1; }
inline int Chunks(int channels) { return (channels + kChunk - 1) / kChunk; }

// acc += tile rows x one part of a block (or of two blocks side by side), all channels in order.
template <int MR, int NB, bool kBf16>
inline __attribute__((always_inline)) void Accumulate(
    const float* tile, size_t chunk_floats, const uint8_t* const* b, size_t channel_bytes,
    int channels, typename Simd::V (&acc)[MR][NB * Simd::kBlockVectors]) {
  constexpr int kV = Simd::kBlockVectors;
  const uint8_t* p[NB];
  for (int i = 0; i < NB; ++i) p[i] = b[i];
  for (int c0 = 0; c0 < channels; c0 += kChunk, tile += chunk_floats) {
    const int n = MinInt(kChunk, channels - c0);
    for (int c = 0; c < n; c += 2) {
      typename Simd::V w[2][NB * kV];
#pragma GCC unroll 4
      for (int i = 0; i < NB; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kV; ++v) {
          if constexpr (kBf16) {
            Simd::LoadPair(p[i] + v * Simd::kWidth * 4, &w[0][i * kV + v], &w[1][i * kV + v]);
          } else {
            w[0][i * kV + v] = Simd::Load(p[i] + v * Simd::kWidth * 4);
            w[1][i * kV + v] = Simd::Load(p[i] + channel_bytes + v * Simd::kWidth * 4);
          }
        }
        if constexpr (kBf16) {
          // The next lines of a stream that the hardware follows only within 4 KiB.
          __builtin_prefetch(p[i] + 1536);
          __builtin_prefetch(p[i] + 1600);
          p[i] += channel_bytes;
        } else {
          p[i] += 2 * channel_bytes;
        }
      }
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          const typename Simd::V x = Simd::Broadcast(tile + r * kTileStride + c + k);
#pragma GCC unroll 8
          for (int v = 0; v < NB * kV; ++v) acc[r][v] = Simd::Fma(x, w[k][v], acc[r][v]);
        }
      }
    }
  }
}

// What one call of a tile works on.
struct TileWork {
  const float* tile;
  size_t chunk_floats;
  const uint8_t* b[2];   // kSwiGlu: gate and up; else one block, or two when NB == 2
  size_t channel_bytes;  // between channels (f32) or channel pairs (bf16)
  int row;               // first row in out
  int column[2];         // first column of each block
};

template <int NV>
inline void StoreRow(const FmaMatmulArgs& args, int row, int column, const typename Simd::V* acc) {
  float* out = static_cast<float*>(args.out) + static_cast<size_t>(row) * args.columns;
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const int left = args.columns - column - v * Simd::kWidth;
    if (left <= 0) return;
    float* dst = out + column + v * Simd::kWidth;
    typename Simd::V value = acc[v];
    if (left >= Simd::kWidth) {
      if (args.epilogue == FmaEpilogue::kAdd) value = Simd::Add(Simd::Load(dst), value);
      Simd::Store(dst, value);
    } else {
      if (args.epilogue == FmaEpilogue::kAdd) value = Simd::Add(Simd::MaskLoad(dst, left), value);
      Simd::MaskStore(dst, value, left);
    }
  }
}

template <int MR, int NB, bool kBf16>
void RunTile(const FmaMatmulArgs& args, const TileWork& work, int channels) {
  constexpr int kV = Simd::kBlockVectors;
  for (int part = 0; part < kParts; ++part) {
    const size_t offset = static_cast<size_t>(part) * kPart * 4;
    const uint8_t* b[NB];
    for (int i = 0; i < NB; ++i) b[i] = work.b[i] + offset;
    typename Simd::V acc[MR][NB * kV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NB * kV; ++v) acc[r][v] = Simd::Zero();
    }
    Accumulate<MR, NB, kBf16>(work.tile, work.chunk_floats, b, work.channel_bytes, channels, acc);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < NB; ++i) {
        StoreRow<kV>(args, work.row + r, work.column[i] + part * kPart, &acc[r][i * kV]);
      }
    }
  }
}

// silu(gate) * up = gate / (1 + e^-gate) * up, one vector of row `row` at `column`.
inline void StoreSwiGlu(const FmaMatmulArgs& args, int row, int column, typename Simd::V gate,
                        typename Simd::V up) {
  const int left = args.columns - column;
  if (left <= 0) return;
  const typename Simd::V y = Simd::Mul(
      Simd::Div(gate, Simd::Add(Simd::Set(1.0f), Simd::Exp(Simd::Negate(gate)))), up);
  const size_t at = static_cast<size_t>(row) * args.columns + column;
  const int n = MinInt(left, Simd::kWidth);
  if (args.act_bf16) {
    Simd::StoreBf16(static_cast<uint16_t*>(args.out) + at, y, n);
  } else {
    Simd::MaskStore(static_cast<float*>(args.out) + at, y, n);
  }
}

template <int MR, bool kBf16>
void RunSwiGluTile(const FmaMatmulArgs& args, const TileWork& work, int channels) {
  constexpr int kV = Simd::kBlockVectors;
  // Few rows: gate and up in one pass, two streams of weights. Else one after the other, the gate
  // kept aside.
  constexpr bool kTogether = MR * kV * 2 <= Simd::kWideAccumulatorsMax;
  constexpr int kNB = kTogether ? 2 : 1;
  alignas(64) float gate[MR][kPart];
  for (int part = 0; part < kParts; ++part) {
    const size_t offset = static_cast<size_t>(part) * kPart * 4;
    const int column = work.column[0] + part * kPart;
    for (int half = 0; half < 3 - kNB; ++half) {
      const uint8_t* b[2] = {work.b[half] + offset, work.b[1] + offset};
      typename Simd::V acc[MR][kNB * kV];
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kNB * kV; ++v) acc[r][v] = Simd::Zero();
      }
      Accumulate<MR, kNB, kBf16>(work.tile, work.chunk_floats, b, work.channel_bytes, channels,
                                 acc);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kV; ++v) {
          float* const g = &gate[r][v * Simd::kWidth];
          const int at = column + v * Simd::kWidth;
          if constexpr (kTogether) {
            StoreSwiGlu(args, work.row + r, at, acc[r][v], acc[r][kV + v]);
          } else if (half == 0) {
            Simd::Store(g, acc[r][v]);
          } else {
            StoreSwiGlu(args, work.row + r, at, Simd::Load(g), acc[r][v]);
          }
        }
      }
    }
  }
}

using TileFn = void (*)(const FmaMatmulArgs&, const TileWork&, int channels);

template <int MR>
inline TileFn ChooseTile(bool swiglu, bool bf16, bool two_blocks) {
  if (swiglu) return bf16 ? &RunSwiGluTile<MR, true> : &RunSwiGluTile<MR, false>;
  if constexpr (MR * Simd::kBlockVectors * 2 <= Simd::kWideAccumulatorsMax) {
    if (two_blocks) return bf16 ? &RunTile<MR, 2, true> : &RunTile<MR, 2, false>;
  }
  return bf16 ? &RunTile<MR, 1, true> : &RunTile<MR, 1, false>;
}

TileFn TileFor(int rows, bool swiglu, bool bf16, bool two_blocks) {
  switch (rows) {
#define KVT_TILE(n) \
  case n:           \
    return ChooseTile<n <= Simd::kRowsMax ? n : 1>(swiglu, bf16, two_blocks);
    KVT_TILE(1) KVT_TILE(2) KVT_TILE(3) KVT_TILE(4) KVT_TILE(5) KVT_TILE(6) KVT_TILE(7)
    KVT_TILE(8) KVT_TILE(9) KVT_TILE(10) KVT_TILE(11) KVT_TILE(12) KVT_TILE(13) KVT_TILE(14)
#undef KVT_TILE
    default:
      __builtin_trap();
  }
}

}  // namespace
}  // namespace kvt
