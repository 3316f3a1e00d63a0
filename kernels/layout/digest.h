// What selection keeps of a block in a layer (DESIGN 1): the keys of one KV head in 2, 3 or 4 bits,
// with an offset and a scale per channel that the calibration fixes. Sizes and offsets; pure
// arithmetic, thread-safe.
//
// A code is in [0, 2^bits); it stands for offset[d] + scale[d] * (code - (2^bits - 1) / 2).
// Everything is rows of 16 bytes, byte t of a row belonging to token t:
//
//   4 bits  head_dim / 2 rows; channel d in row d / 2, bits 4 (d % 2) ..
//   2 bits  head_dim / 4 rows; channel d in row d / 4, bits 2 (d % 4) ..
//   3 bits  the low two bits as above, then head_dim / 8 rows with the high bit: row d / 8, bit d % 8
//
// The digest of a layer that has several selecting heads is theirs one after the other.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/base/limits.h"

namespace kvt {

inline constexpr int kDigestBitsMin = 2;
inline constexpr int kDigestBitsMax = 4;
// Selecting heads of one layer.
inline constexpr int kDigestHeadsMax = 8;

// Bytes of one block and head.
[[nodiscard]] constexpr uint32_t DigestHeadBytes(int head_dim, int bits) {
  return kBlockTokens * static_cast<uint32_t>(head_dim) * static_cast<uint32_t>(bits) / 8;
}

[[nodiscard]] constexpr uint8_t DigestCode(const uint8_t* digest, int head_dim, int bits, int token,
                                           int channel) {
  const int low = bits == 4 ? 4 : 2;
  const int per_byte = 8 / low;
  const int row = channel / per_byte;
  int code = digest[row * kBlockTokens + token] >> (low * (channel % per_byte)) & ((1 << low) - 1);
  if (bits == 3) {
    const int high = head_dim / 4 + channel / 8;
    code |= (digest[high * kBlockTokens + token] >> (channel % 8) & 1) << 2;
  }
  return static_cast<uint8_t>(code);
}

// Adds a code to a digest that is zero there.
constexpr void SetDigestCode(uint8_t* digest, int head_dim, int bits, int token, int channel,
                             uint8_t code) {
  const int low = bits == 4 ? 4 : 2;
  const int per_byte = 8 / low;
  uint8_t& byte = digest[channel / per_byte * kBlockTokens + token];
  byte = static_cast<uint8_t>(byte | (code & ((1 << low) - 1)) << (low * (channel % per_byte)));
  if (bits == 3) {
    uint8_t& high = digest[(head_dim / 4 + channel / 8) * kBlockTokens + token];
    high = static_cast<uint8_t>(high | (code >> 2) << (channel % 8));
  }
}

// The code of a key's channel; beyond the ends the nearest one, 0 for a NaN.
[[nodiscard]] inline uint8_t DigestQuantise(float key, float offset, float inverse_scale, int bits) {
  const int levels = 1 << bits;
  const float code = (key - offset) * inverse_scale + 0.5f * static_cast<float>(levels - 1);
  if (!(code > 0)) return 0;
  if (code >= static_cast<float>(levels - 1)) return static_cast<uint8_t>(levels - 1);
  return static_cast<uint8_t>(std::nearbyint(code));
}

}  // namespace kvt
