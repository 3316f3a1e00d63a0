// What the planner of paged attention (paged_attention.cc) hands to an instruction set's
// implementation (attention_isa_*.cc): one task is some rows of one segment and one KV head over one
// range of keys. Plain pointers and numbers, so that files built for wider instruction sets emit no
// inline function that others share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/layout/geometry.h"
#include "kernels/paged_kv.h"

namespace kvt {

// Keys of a tile and of a range (paged_attention.h states the numerics that hang on them).
inline constexpr int kAttentionTile = 128;
inline constexpr int kAttentionRange = 512;

// A query vector is one query head of one row; vector i of a task is row i / group, head i % group
// of the KV head's group.
struct AttentionTask {
  int head_dim;
  int group;
  int rows;
  int first_position;  // of row 0
  int key_begin;       // multiple of kAttentionRange
  int key_end;         // <= first_position + rows; keys [key_begin, key_end) are this task's
  int ahead_end;       // keys of the sequence that may be fetched ahead, >= key_end
  float scale;
  const uint8_t* slots;  // of this KV head: slot s has its slice at slots + s * slot_bytes
  size_t slot_bytes;
  const SlotPair* blocks;
  const float* q;  // row r head h at q + r * q_stride + h * head_dim
  ptrdiff_t q_stride;
  void* out;  // the same for out; null: write `partial` instead
  ptrdiff_t out_stride;
  bool out_bf16;
  float* partial;  // vector i at partial + i * AttentionPartialFloats(head_dim); one range only
  uint8_t* scratch;  // 64-byte aligned, AttentionScratchBytes(head_dim)
};

// Joins `ranges` partial results of one query vector, in order, and writes the row.
struct AttentionCombineTask {
  int head_dim;
  int ranges;
  const float* partial;  // range r at partial + r * range_stride
  size_t range_stride;   // floats
  void* out;
  bool out_bf16;
};

struct AttentionIsa {
  const char* name;
  void (*run)(const AttentionTask& task);
  void (*combine)(const AttentionCombineTask& task);
};

// A partial result: maximum, sum, then head_dim accumulators; padded to whole cache lines.
constexpr int AttentionPartialFloats(int head_dim) { return head_dim + 16; }

// Query vectors of one task at most: enough for the conversion of a tile to be paid many times over,
// few enough for their state to stay in the second-level cache.
constexpr int AttentionVectorsMax(int head_dim) {
  return head_dim <= 64 ? 384 : head_dim <= 128 ? 256 : 128;
}

// Scratch of one thread: queries, two states, a panel of K or V as operands, scores.
constexpr size_t AttentionScratchBytes(int head_dim) {
  const auto vectors = static_cast<size_t>(AttentionVectorsMax(head_dim));
  const auto dim = static_cast<size_t>(head_dim);
  const size_t floats = vectors * dim                       // queries
                        + 2 * vectors * dim                 // accumulators: range, total
                        + vectors * 16                      // sums of the range, by lane
                        + 4 * (vectors + 16)                // maxima, sum of the total, alpha
                        + 64 * dim                          // a panel of K or V
                        + vectors * kAttentionTile;         // scores
  return floats * sizeof(float) + 16 * 64;                  // each part starts a cache line
}

const AttentionIsa& AttentionAvx2();
const AttentionIsa& AttentionAvx512();
const AttentionIsa& AttentionAvx512Bf16();

}  // namespace kvt
