// The body of fma_matmul_*.cc, over a `Simd` that the including file defines:
//   V, I, kWidth, kRowsMax (tile rows), kBlockVectors (vectors of a tile's columns),
//   Zero, Load, Store, MaskLoad, MaskStore, Broadcast, Fma, Add, Mul, Div, LoadPair (widen 2 channels),
//   Exp, StoreBf16.
// A block of 32 columns is walked in parts of kWidth * kBlockVectors columns.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/fma_matmul.h"

namespace kvt {
namespace {

constexpr int kChunk = 512;         // channels of one piece of a row tile
constexpr int kTileStride = 528;    // floats between rows of a piece, off the 4 KiB alias
constexpr int kPanelChannelsMax = 4096;  // longer panels would leave L2
constexpr size_t kTileBytesMax = 512 * 1024;
constexpr int kPart = Simd::kWidth * Simd::kBlockVectors;
constexpr int kParts = kFmaBlockColumns / kPart;

inline int MinInt(int a, int b) { return a < b ? a : b; }
inline int EvenChannels(int channels) { return (channels + 1) & ~1; }
inline int Chunks(int channels) { return (channels + kChunk - 1) / kChunk; }

// Where row tiles and panel of one member lie in the workspace.
struct Scratch {
  float* tiles;   // [tile][chunk][tile rows][kTileStride]
  float* panels;  // two blocks, f32 [channel][32]
  int rows_max;   // rows that `tiles` holds
};

// A tile row in f32; the odd channel that pads to even is zero.
void CopyRow(const FmaMatmulArgs& args, int row, float* tile_row, size_t chunk_floats) {
  const int channels = args.channels;
  for (int c0 = 0; c0 < channels; c0 += kChunk) {
    const int n = MinInt(kChunk, channels - c0);
    float* dst = tile_row + static_cast<size_t>(c0 / kChunk) * chunk_floats;
    if (args.act_bf16) {
      const uint16_t* src = static_cast<const uint16_t*>(args.a) +
                            static_cast<size_t>(row) * channels + c0;
      for (int i = 0; i < n; ++i) {
        const uint32_t bits = static_cast<uint32_t>(src[i]) << 16;
        memcpy(dst + i, &bits, 4);
      }
    } else {
      memcpy(dst, static_cast<const float*>(args.a) + static_cast<size_t>(row) * channels + c0,
             static_cast<size_t>(n) * 4);
    }
    if (n & 1) dst[n] = 0;
  }
}

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

bool TwoBlocks(int rows) {
  return rows * Simd::kBlockVectors * 2 <= Simd::kWideAccumulatorsMax;
}

// Widens one bf16 block to f32 [channel][32].
void WidenBlock(const uint8_t* block, int channels, float* panel) {
  for (int c = 0; c < channels; c += 2) {
    for (int v = 0; v < kFmaBlockColumns / Simd::kWidth; ++v) {
      typename Simd::V low, high;
      Simd::LoadPair(block + (static_cast<size_t>(c / 2) * kFmaBlockColumns + v * Simd::kWidth) * 4,
                     &low, &high);
      Simd::Store(panel + static_cast<size_t>(c) * kFmaBlockColumns + v * Simd::kWidth, low);
      Simd::Store(panel + static_cast<size_t>(c + 1) * kFmaBlockColumns + v * Simd::kWidth, high);
    }
  }
}

// Rows [row0, row1) times blocks [block0, block1) (kSwiGlu: pairs of blocks).
void RunRange(const FmaMatmulArgs& args, const Scratch& scratch, int row0, int row1, int block0,
              int block1) {
  const int rows = row1 - row0;
  const int channels = EvenChannels(args.channels);
  const int tiles = (rows + Simd::kRowsMax - 1) / Simd::kRowsMax;
  const int tile_rows_max = (rows + tiles - 1) / tiles;
  const size_t chunk_floats = static_cast<size_t>(tile_rows_max) * kTileStride;
  const size_t tile_floats = chunk_floats * static_cast<size_t>(Chunks(channels));
  const auto tile_begin = [&](int t) { return static_cast<int>(static_cast<int64_t>(rows) * t / tiles); };
  for (int t = 0; t < tiles; ++t) {
    for (int r = tile_begin(t); r < tile_begin(t + 1); ++r) {
      CopyRow(args, row0 + r,
              scratch.tiles + static_cast<size_t>(t) * tile_floats +
                  static_cast<size_t>(r - tile_begin(t)) * kTileStride,
              chunk_floats);
    }
  }
  const bool swiglu = args.epilogue == FmaEpilogue::kSwiGlu;
  const bool widen = args.weights_bf16 && tiles > 3 && channels <= kPanelChannelsMax;
  const bool bf16 = args.weights_bf16 && !widen;
  const bool pair = !swiglu && !widen && tiles == 1 && TwoBlocks(rows);
  const size_t block_bytes =
      static_cast<size_t>(channels) * kFmaBlockColumns * (args.weights_bf16 ? 2 : 4);
  const size_t panel_floats = static_cast<size_t>(channels) * kFmaBlockColumns;
  const uint8_t* weights = static_cast<const uint8_t*>(args.weights);
  // Two blocks side by side lie half the range apart, so that each of the two streams is contiguous.
  const int count = block1 - block0;
  const int half = pair ? count / 2 : 0;
  const int up_block = (args.columns + kFmaBlockColumns - 1) / kFmaBlockColumns;
  for (int i = 0; i < count - half; ++i) {
    const int streams = swiglu || i < half ? 2 : 1;
    const int blocks[2] = {block0 + i, swiglu ? up_block + block0 + i : block0 + i + count - half};
    TileWork work{};
    work.chunk_floats = chunk_floats;
    // bf16: one channel pair of the block's 32 columns; f32: one channel.
    work.channel_bytes = kFmaBlockColumns * 4;
    for (int s = 0; s < streams; ++s) {
      const uint8_t* packed = weights + static_cast<size_t>(blocks[s]) * block_bytes;
      work.column[s] = blocks[s] * kFmaBlockColumns;
      if (widen) {
        float* panel = scratch.panels + static_cast<size_t>(s) * panel_floats;
        WidenBlock(packed, channels, panel);
        packed = reinterpret_cast<const uint8_t*>(panel);
      }
      work.b[s] = packed;
    }
    for (int t = 0; t < tiles; ++t) {
      work.tile = scratch.tiles + static_cast<size_t>(t) * tile_floats;
      work.row = row0 + tile_begin(t);
      TileFor(tile_begin(t + 1) - tile_begin(t), swiglu, bf16, !swiglu && streams == 2)(args, work,
                                                                                     channels);
    }
  }
}

void RunMember(const FmaMatmulArgs& args, int member, int members) {
  const int blocks = (args.columns + kFmaBlockColumns - 1) / kFmaBlockColumns;
  const size_t share = args.workspace_bytes / static_cast<size_t>(members) / 64 * 64;
  const size_t panel_bytes = static_cast<size_t>(MinInt(EvenChannels(args.channels),
                                                        kPanelChannelsMax)) *
                             kFmaBlockColumns * 4 * 2;
  const size_t row_bytes = static_cast<size_t>(Chunks(args.channels)) * kTileStride * 4;
  Scratch scratch;
  scratch.panels = reinterpret_cast<float*>(args.workspace + share * static_cast<size_t>(member));
  scratch.tiles = scratch.panels + panel_bytes / 4;
  // All tiles take the room of the largest: up to one row a tile more than there are rows.
  const int room = static_cast<int>((share - panel_bytes) / row_bytes);
  scratch.rows_max = room - room / (Simd::kRowsMax + 1) - 1;
  int row0 = 0, row1 = args.rows, block0 = 0, block1 = blocks;
  if (args.rows >= members * 2 * Simd::kRowsMax) {
    row0 = static_cast<int>(static_cast<int64_t>(args.rows) * member / members);
    row1 = static_cast<int>(static_cast<int64_t>(args.rows) * (member + 1) / members);
  } else {
    block0 = static_cast<int>(static_cast<int64_t>(blocks) * member / members);
    block1 = static_cast<int>(static_cast<int64_t>(blocks) * (member + 1) / members);
  }
  const int turns = (row1 - row0 + scratch.rows_max - 1) / scratch.rows_max;
  for (int t = 0; t < turns; ++t) {
    const int64_t rows = row1 - row0;
    RunRange(args, scratch, row0 + static_cast<int>(rows * t / turns),
             row0 + static_cast<int>(rows * (t + 1) / turns), block0, block1);
  }
}

}  // namespace
}  // namespace kvt
