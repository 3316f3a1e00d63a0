// Matrix products with f32 fused multiply-adds and weights stored as bf16 or f32. Each result is one
// chain of fused multiply-adds over the channels in ascending order, whatever the number of rows, so
// rows are bitwise equal for every M by construction, on every instruction set.
//
// Why beside oneDNN: Intel processors without AMX issue one 512-bit bf16 dot product in two cycles
// and two f32 multiply-adds in one, so f32 products of bf16 weights are twice as fast there (measured
// 163 against 82 GFLOP/s a core); and oneDNN 2.6 neither streams weights well at M = 1 nor keeps rows
// equal with AVX2.
//
// Weights, packed once: blocks of 32 columns, for bf16 [block][channel pair][32 columns][2], for f32
// [block][channel][32 columns]; channels padded to even, columns to 32, with zeros. One vector of
// 32-bit lanes widens to the two channels of its columns by a shift and a mask.
//
// A member's share: with few rows a range of blocks, all rows; with many a range of rows, all
// blocks, then a block is widened once (panel) for all its row tiles. Rows are copied to f32 tiles of
// at most 14 rows (6 with AVX2) that stay in L2. Bytes moved at M = 1: the weights once. Bound: memory
// below about 6 rows, multiply-adds above.
//
// Plain data only: this header is included by files compiled for wider instruction sets.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvt {

inline constexpr int kFmaBlockColumns = 32;

enum class FmaEpilogue : uint8_t { kStore, kAdd, kSwiGlu };

struct FmaMatmulArgs {
  const void* weights;  // packed
  bool weights_bf16;    // else f32
  const void* a;        // [rows][channels]
  bool act_bf16;        // type of a, and of out with kSwiGlu; else f32
  void* out;            // [rows][columns]; kSwiGlu: [rows][columns] of silu(gate) * up
  FmaEpilogue epilogue;
  int rows;
  int channels;
  // kSwiGlu: columns of gate and of up each; all blocks of gate lie before those of up.
  int columns;
  uint8_t* workspace;  // of all members, 64-byte aligned
  size_t workspace_bytes;
};

// Workspace for `members` members; more rows than this many are done in turns.
size_t FmaMatmulWorkspaceBytes(int channels, int rows, int members);

// Called by every member. No barrier inside; no member reads what another wrote.
using FmaMatmulFn = void (*)(const FmaMatmulArgs& args, int member, int members);
void FmaMatmulAvx2(const FmaMatmulArgs& args, int member, int members);
void FmaMatmulAvx512(const FmaMatmulArgs& args, int member, int members);

}  // namespace kvt
