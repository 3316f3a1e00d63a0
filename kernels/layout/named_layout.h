// NamedLayout::kPairSwizzle: the order of bytes within a slice (one layer, one KV head, one plane of
// a block of 16 tokens). Both planes have the same order. Pure arithmetic; thread-safe.
//
// A slice is K (16 x D bytes), then V (16 x D bytes). Both are rows of 32 bytes, and a row holds two
// groups of 16 values, g = 0 and 1, j = 0 .. 15:
//
//   byte of (g, j) in the row = (j / 8) * 16 + g * 8 + j % 8
//
//   offset   0..7      8..15     16..23     24..31
//   holds    g0:j0-7   g1:j0-7   g0:j8-15   g1:j8-15
//
// so that, in each 128-bit lane, one unpack-low of (residual, base) joins the planes of group 0 and
// one unpack-high those of group 1, both with j in order.
//   K: row d / 2, group d % 2, j = token         (channel pairs; tokens are lanes)
//   V: row token * (D / 32) + d / 32, group (d % 32) / 16, j = d % 16   (token-major)
#pragma once

#include <cstdint>

#include "kernels/base/limits.h"

namespace kvt {

inline constexpr uint32_t kLayoutRowBytes = 32;

[[nodiscard]] constexpr uint32_t PairSwizzleRowOffset(uint32_t group, uint32_t j) {
  return (j / 8) * 16 + group * 8 + j % 8;
}

// Byte offset of K(token, channel) within a slice. token in [0, 16), channel in [0, head_dim).
[[nodiscard]] constexpr uint32_t KOffset(int token, int channel) {
  const auto t = static_cast<uint32_t>(token);
  const auto d = static_cast<uint32_t>(channel);
  return (d / 2) * kLayoutRowBytes + PairSwizzleRowOffset(d % 2, t);
}

// Byte offset of V(token, channel) within a slice of this head_dim (a multiple of 32).
[[nodiscard]] constexpr uint32_t VOffset(int head_dim, int token, int channel) {
  const auto t = static_cast<uint32_t>(token);
  const auto d = static_cast<uint32_t>(channel);
  const auto dim = static_cast<uint32_t>(head_dim);
  return kBlockTokens * dim + (t * (dim / 32) + d / 32) * kLayoutRowBytes +
         PairSwizzleRowOffset((d % 32) / 16, d % 16);
}

}  // namespace kvt
