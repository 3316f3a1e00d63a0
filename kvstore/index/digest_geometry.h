// How a store knows digests from KV (docs/decisions/0007): by the shape of their records. So neither
// the wire nor the disk says it, and a restarted store knows it again. Pure.
#pragma once

#include "kernels/layout/geometry.h"

namespace kvt {

// Digests have one layer of `heads` heads of this many channels; no model's KV has that shape. If
// one had, its blocks would be given up in another order, and be right all the same.
inline constexpr int kDigestHeadDim = 32;

[[nodiscard]] constexpr Geometry DigestGeometry(int heads) {
  return Geometry{.layers = 1, .kv_heads = heads, .head_dim = kDigestHeadDim};
}
[[nodiscard]] constexpr bool IsDigestGeometry(const Geometry& geometry) {
  return geometry.layers == 1 && geometry.head_dim == kDigestHeadDim;
}

}  // namespace kvt
