// Values and planes: how an fp16 value is split into a BASE and a RESIDUAL byte and read back, and
// how an f32 becomes the stored fp16 (DESIGN 2). The scalar reference of every kernel; thread-safe.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace kvt {

// The residual byte that a BASE block's values read with: the midpoint of the cell.
inline constexpr uint8_t kResidualMidpoint = 0x80;
inline constexpr float kHalfMax = 65504.0f;

[[nodiscard]] constexpr uint8_t BaseByte(uint16_t half_bits) {
  return static_cast<uint8_t>(half_bits >> 8);
}
[[nodiscard]] constexpr uint8_t ResidualByte(uint16_t half_bits) {
  return static_cast<uint8_t>(half_bits & 0xff);
}
[[nodiscard]] constexpr uint16_t JoinTarget(uint8_t base, uint8_t residual) {
  return static_cast<uint16_t>(base << 8 | residual);
}
[[nodiscard]] constexpr uint16_t JoinBase(uint8_t base) {
  return JoinTarget(base, kResidualMidpoint);
}

// fp16 bits to f32: exact, for every code (a NaN keeps its payload and becomes quiet).
[[nodiscard]] float HalfToFloat(uint16_t half_bits);

enum class HalfRounding : uint8_t { kExactOrRounded, kSaturated, kNan };
struct StoredHalf {
  uint16_t bits = 0;
  HalfRounding rounding = HalfRounding::kExactOrRounded;
};
// f32 to the stored fp16: to nearest, ties to even; what would become infinite is saturated to
// +-65504; a NaN stays a (quiet) NaN.
[[nodiscard]] StoredHalf FloatToStoredHalf(float value);

// Splits values into the planes of a slice, and joins them back; residual empty reads as BASE.
// `half_bits` is ordered K(token, channel) token-major, then V(token, channel) token-major:
// 2 * 16 * head_dim values. Planes have that many bytes each, in the named layout.
void SplitSlice(int head_dim, absl::Span<const uint16_t> half_bits, absl::Span<uint8_t> base,
                absl::Span<uint8_t> residual);
void JoinSlice(int head_dim, absl::Span<const uint8_t> base, absl::Span<const uint8_t> residual,
               absl::Span<uint16_t> half_bits);

}  // namespace kvt
