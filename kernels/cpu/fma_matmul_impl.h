// Ranges of fma_matmul_*.cc: how a member's share of a product is cut into row tiles and blocks.
// Over the `Simd` of fma_tile.h.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/fma_matmul.h"
#include "kernels/cpu/fma_tile.h"

namespace kvt {
namespace {

constexpr int kPanelChannelsMax = 4096;  // longer panels would leave L2
constexpr size_t kTileBytesMax = 512 * 1024;

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
