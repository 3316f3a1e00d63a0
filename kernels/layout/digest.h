// What selection keeps of a block in a layer (DESIGN 1): the keys of one KV head in 2, 3 or 4 bits,
// with an offset and a scale per channel that the calibration fixes. Sizes and offsets; pure
// arithmetic, thread-safe.
//
// A code is in [0, 2^bits); it stands for offset[d] + scale[d] * (code - (2^bits - 1) / 2).
// Everything is rows of 64 bytes: byte 4 t + c of a row belongs to token t and to channels d with
// d % 4 = c, so that four neighbouring bytes are four channels of one token, which is what byte dot
// products add up. A byte holds several groups of four channels, from the low bits up:
//
//   4 bits  head_dim / 8 rows;  channel d in row d / 8,  bits 4 (d % 8 / 4) ..
//   2 bits  head_dim / 16 rows; channel d in row d / 16, bits 2 (d % 16 / 4) ..
//   3 bits  the low two bits as above, then head_dim / 32 rows with the high bit: row d / 32,
//           bit d % 32 / 4
//
// The digest of a layer that has several selecting heads is theirs one after the other.
//
// Queries meet codes as integers: a query of the head's group, times the channels' scales, is
// rounded to 8 bits with one step, kDigestQueryMax of which are its largest channel
// (DigestQuantiseQuery). Its product with a key is step * sum over d of q8[d] * code[d], and a
// constant that all keys share.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/base/limits.h"

namespace kvt {

// The order of a digest's bytes. It is in the keys of stored digests: those of another version are
// not found. Version 1 had rows of 16 bytes.
inline constexpr int kDigestLayoutVersion = 2;
inline constexpr uint32_t kDigestRowBytes = 4 * kBlockTokens;
// Channels of a digest come in whole rows of any kind.
inline constexpr int kDigestChannelsMultiple = 32;
inline constexpr int kDigestHeadDimMax = 256;

inline constexpr int kDigestBitsMin = 2;
inline constexpr int kDigestBitsMax = 4;
// Selecting heads of one layer.
inline constexpr int kDigestHeadsMax = 8;

// Bytes of one block and head.
[[nodiscard]] constexpr uint32_t DigestHeadBytes(int head_dim, int bits) {
  return kBlockTokens * static_cast<uint32_t>(head_dim) * static_cast<uint32_t>(bits) / 8;
}

// Where `width` bits of a channel lie among rows that hold so many of each.
struct DigestPlace {
  uint32_t byte;
  int shift;
};
[[nodiscard]] constexpr DigestPlace DigestPlaceOf(int width, int token, int channel) {
  const int per_row = 4 * (8 / width);
  return {static_cast<uint32_t>(channel / per_row) * kDigestRowBytes +
              static_cast<uint32_t>(4 * token + channel % 4),
          channel % per_row / 4 * width};
}
// Where the rows of high bits begin (3 bits).
[[nodiscard]] constexpr uint32_t DigestHighRows(int head_dim) { return DigestHeadBytes(head_dim, 2); }

[[nodiscard]] constexpr uint8_t DigestCode(const uint8_t* digest, int head_dim, int bits, int token,
                                           int channel) {
  const int low = bits == 4 ? 4 : 2;
  const DigestPlace at = DigestPlaceOf(low, token, channel);
  int code = digest[at.byte] >> at.shift & ((1 << low) - 1);
  if (bits == 3) {
    const DigestPlace high = DigestPlaceOf(1, token, channel);
    code |= (digest[DigestHighRows(head_dim) + high.byte] >> high.shift & 1) << 2;
  }
  return static_cast<uint8_t>(code);
}

// Adds a code to a digest that is zero there.
constexpr void SetDigestCode(uint8_t* digest, int head_dim, int bits, int token, int channel,
                             uint8_t code) {
  const int low = bits == 4 ? 4 : 2;
  const DigestPlace at = DigestPlaceOf(low, token, channel);
  digest[at.byte] = static_cast<uint8_t>(digest[at.byte] | (code & ((1 << low) - 1)) << at.shift);
  if (bits == 3) {
    const DigestPlace place = DigestPlaceOf(1, token, channel);
    uint8_t& high = digest[DigestHighRows(head_dim) + place.byte];
    high = static_cast<uint8_t>(high | (code >> 2) << place.shift);
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

inline constexpr int kDigestQueryMax = 127;
// Below this a query's largest |q[d] * scale[d]| counts as nothing.
inline constexpr float kDigestQueryLeast = 1e-30f;

// out[d] = q[d] * scale[d] / step, to nearest, ties to even; step, which it returns, is the largest
// |q[d] * scale[d]| / kDigestQueryMax. Where that is not a number of at least kDigestQueryLeast, out
// is zeros and step 1: every key is as good as another.
[[nodiscard]] inline float DigestQuantiseQuery(const float* q, const float* scale, int head_dim,
                                               int8_t* out) {
  // As integers, |x| are in order, infinities and NaNs above all numbers.
  uint32_t largest = 0;
  for (int d = 0; d < head_dim; ++d) {
    largest = std::max(largest, std::bit_cast<uint32_t>(q[d] * scale[d]) & 0x7fffffffu);
  }
  const float most = std::bit_cast<float>(largest);
  if (!std::isfinite(most) || most < kDigestQueryLeast) {
    std::fill_n(out, head_dim, int8_t{0});
    return 1;
  }
  const float inverse = static_cast<float>(kDigestQueryMax) / most;
  for (int d = 0; d < head_dim; ++d) {
    out[d] = static_cast<int8_t>(static_cast<int>(std::nearbyint(q[d] * scale[d] * inverse)));
  }
  return most / static_cast<float>(kDigestQueryMax);
}

}  // namespace kvt
