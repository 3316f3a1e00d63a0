#include "kernels/layout/planes.h"

#include <bit>
#include <cmath>
#include <cstddef>

#include "kernels/base/check.h"
#include "kernels/layout/named_layout.h"

namespace kvt {
namespace {

constexpr uint16_t kHalfSign = 0x8000;
constexpr uint16_t kHalfQuiet = 0x0200;
constexpr uint16_t kHalfInfinity = 0x7c00;
constexpr uint16_t kHalfMaxBits = 0x7bff;

// Calls fn(index in token-major K then V, byte offset in the slice) for every value.
template <typename Fn>
void ForEachValue(int head_dim, Fn fn) {
  size_t index = 0;
  for (int token = 0; token < kBlockTokens; ++token) {
    for (int d = 0; d < head_dim; ++d) fn(index++, KOffset(token, d));
  }
  for (int token = 0; token < kBlockTokens; ++token) {
    for (int d = 0; d < head_dim; ++d) fn(index++, VOffset(head_dim, token, d));
  }
}

}  // namespace

float HalfToFloat(uint16_t half_bits) {
  const uint32_t sign = static_cast<uint32_t>(half_bits & kHalfSign) << 16;
  const uint32_t exponent = (half_bits >> 10) & 0x1f;
  const uint32_t mantissa = half_bits & 0x3ff;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | mantissa << 13);
  }
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

StoredHalf FloatToStoredHalf(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & kHalfSign);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    const auto payload = static_cast<uint16_t>(magnitude >> 13 & 0x3ff);
    return {static_cast<uint16_t>(sign | kHalfInfinity | kHalfQuiet | payload), HalfRounding::kNan};
  }
  // 65520 is halfway to the first value beyond the largest fp16; ties go to even, which is beyond.
  if (magnitude >= std::bit_cast<uint32_t>(65520.0f)) {
    return {static_cast<uint16_t>(sign | kHalfMaxBits), HalfRounding::kSaturated};
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, a multiple of 2^-24
    const float scaled = std::ldexp(std::bit_cast<float>(magnitude), 24);
    return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(scaled)))};
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1);
  return {static_cast<uint16_t>(sign | static_cast<uint16_t>((rounded >> 13) - (112u << 10)))};
}

void SplitSlice(int head_dim, absl::Span<const uint16_t> half_bits, absl::Span<uint8_t> base,
                absl::Span<uint8_t> residual) {
  const size_t values = size_t{2} * kBlockTokens * static_cast<size_t>(head_dim);
  KVT_CHECK(head_dim % 32 == 0 && half_bits.size() == values && base.size() == values &&
            residual.size() == values, "head_dim=", head_dim, " values=", half_bits.size());
  ForEachValue(head_dim, [&](size_t index, uint32_t offset) {
    base[offset] = BaseByte(half_bits[index]);
    residual[offset] = ResidualByte(half_bits[index]);
  });
}

void JoinSlice(int head_dim, absl::Span<const uint8_t> base, absl::Span<const uint8_t> residual,
               absl::Span<uint16_t> half_bits) {
  const size_t values = size_t{2} * kBlockTokens * static_cast<size_t>(head_dim);
  KVT_CHECK(head_dim % 32 == 0 && half_bits.size() == values && base.size() == values &&
            (residual.empty() || residual.size() == values),
            "head_dim=", head_dim, " values=", half_bits.size());
  ForEachValue(head_dim, [&](size_t index, uint32_t offset) {
    half_bits[index] = residual.empty() ? JoinBase(base[offset])
                                        : JoinTarget(base[offset], residual[offset]);
  });
}

}  // namespace kvt
