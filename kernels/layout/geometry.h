// Sizes and offsets of the KV of one model: what a slot, a record and a slice are, and where they
// lie. Pure arithmetic; thread-safe.
//
// A block is kBlockTokens = 16 tokens, all layers, all KV heads. Its 16-bit values are split into
// two byte planes, BASE (upper bytes) and RESIDUAL (lower bytes). One plane of one block is a
// *record*:
//
//   record   = layer 0 | layer 1 | ... | layer L-1            record_bytes = L * slot_bytes
//   slot     = head 0 | head 1 | ... | head H-1               slot_bytes   = H * slice_bytes
//   slice    = K of the head (16 x D bytes) | V of the head   slice_bytes  = 2 * 16 * D
//
// So one layer, or a head range of one layer, is contiguous. Within a slice the order of bytes is
// the named layout (kernels/layout/named_layout.h), the same for both planes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "kernels/base/limits.h"

namespace kvt {

enum class Plane : uint8_t { kBase = 0, kResidual = 1 };
inline constexpr int kPlanes = 2;

// Byte order within a slice. Part of every key and of the attach handshake.
enum class NamedLayout : uint8_t {
  // K in channel pairs, V token-major, both swizzled for one unpack low/high (named_layout.h).
  kPairSwizzle = 1,
};

struct Geometry {
  int layers = 0;
  int kv_heads = 0;  // of the whole model; a tensor-parallel rank reads a head range
  int head_dim = 0;  // multiple of 32
  NamedLayout layout = NamedLayout::kPairSwizzle;

  // InvalidArgument naming the field: layers in [1, 256], kv_heads in [1, 128], head_dim in
  // [32, 256] and a multiple of 32.
  [[nodiscard]] absl::Status Validate() const;

  [[nodiscard]] constexpr uint32_t SliceBytes() const {
    return 2u * kBlockTokens * static_cast<uint32_t>(head_dim);
  }
  [[nodiscard]] constexpr uint32_t SlotBytes() const {
    return static_cast<uint32_t>(kv_heads) * SliceBytes();
  }
  [[nodiscard]] constexpr uint32_t RecordBytes() const {
    return static_cast<uint32_t>(layers) * SlotBytes();
  }
  // Slices of one record: (layer, head) pairs, index = layer * kv_heads + head.
  [[nodiscard]] constexpr uint32_t SlicesPerRecord() const {
    return static_cast<uint32_t>(layers) * static_cast<uint32_t>(kv_heads);
  }
  [[nodiscard]] constexpr uint32_t SlotOffset(int layer) const {
    return static_cast<uint32_t>(layer) * SlotBytes();
  }
  [[nodiscard]] constexpr uint32_t SliceOffset(int layer, int head) const {
    return SlotOffset(layer) + static_cast<uint32_t>(head) * SliceBytes();
  }

  // "L30 H3 D64 pair-swizzle": for messages that show two geometries that differ.
  [[nodiscard]] std::string ToString() const;
  // Equal geometries have equal fingerprints; carried in keys and at attach.
  [[nodiscard]] uint64_t Fingerprint() const;

  friend bool operator==(const Geometry&, const Geometry&) = default;
};

}  // namespace kvt
