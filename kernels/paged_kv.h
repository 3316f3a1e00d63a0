// KV on the device: slots and block tables, and the arguments of the two operations that touch
// them, paged attention and KV write. Shared by every backend.
//
// A slot holds one plane of one layer of one block (Geometry::SlotBytes()). All slots of a geometry
// lie in one device allocation: slot i starts at slots + i * slot_bytes, 64-byte aligned. A block's
// table entry per layer is a SlotPair; residual == kSlotNone is a BASE block, whose values read as
// base << 8 | 0x80 (DESIGN 2).
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/layout/geometry.h"

namespace kvt {

inline constexpr uint32_t kSlotNone = UINT32_MAX;

struct SlotPair {
  uint32_t base = kSlotNone;
  uint32_t residual = kSlotNone;
  friend bool operator==(const SlotPair&, const SlotPair&) = default;
};

// How products are computed. Part of the numerics id.
enum class ComputeType : uint8_t { kF32, kBf16 };

// Rows of one sequence in a step: a prefill chunk, or one decode row. Row r of the segment is
// position first_position + r and attends to positions 0 .. first_position + r (causal).
struct AttentionSegment {
  const SlotPair* blocks;  // table of this sequence and layer; entry b covers positions 16b..16b+15
  int first_position;
  int first_row;  // in q and out
  int rows;       // > 0
};

// out[row, h, :] = softmax(scale * q[row, h, :] . K[kv(h)]^T) V[kv(h)], kv(h) = h / (query_heads /
// kv_heads), K and V read from slots in the stored fp16 (in bf16 mode the backend may round them,
// the query and the weights to bf16 for the products, accumulated in f32). The result of a row
// depends on its own sequence alone, bit for bit (DESIGN 2: key tiles of fixed size anchored at
// position 0, combined in order; masked positions are selected away).
struct PagedAttentionArgs {
  Geometry geometry;
  int query_heads = 0;  // multiple of geometry.kv_heads
  ComputeType compute = ComputeType::kF32;
  float scale = 0;
  const uint8_t* slots = nullptr;
  // f32 after rope; row r head h at q + r * q_stride + h * head_dim.
  const float* q = nullptr;
  int q_stride = 0;  // elements
  // f32 (kF32) or bf16 as uint16_t (kBf16); row r head h at out + r * out_stride + h * head_dim.
  void* out = nullptr;
  int out_stride = 0;  // elements
  absl::Span<const AttentionSegment> segments;
};

// Rounds K (after rope, f32) and V (f32) to fp16 once, saturating to +-65504, splits them into
// planes and stores them in the slots of their positions. A NaN is stored as NaN and counted.
struct WriteKvArgs {
  Geometry geometry;
  uint8_t* slots = nullptr;
  // Row r, KV head h at k + r * k_stride + h * head_dim; the same for v.
  const float* k = nullptr;
  const float* v = nullptr;
  int k_stride = 0;
  int v_stride = 0;
  absl::Span<const AttentionSegment> segments;  // first_position need not be block-aligned
};

struct WriteKvResult {
  uint64_t saturated = 0;
  uint64_t nan = 0;
};

}  // namespace kvt
