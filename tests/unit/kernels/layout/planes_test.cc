#include "kernels/layout/planes.h"

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/limits.h"
#include "kernels/layout/named_layout.h"

namespace kvt {
namespace {

uint16_t HardwareHalf(float value) {
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}

TEST(Planes, TargetValue_AllCodes_SplitAndJoinAreInverse) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    ASSERT_EQ(JoinTarget(BaseByte(bits), ResidualByte(bits)), bits);
  }
}

TEST(Planes, BaseValue_AllCodes_IsMidpointOfItsCell) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    const uint16_t base = JoinBase(BaseByte(bits));
    ASSERT_EQ(base, (bits & 0xff00) | 0x80);
    // Read as BASE, a code is at most half a cell away, in steps of the fp16 grid.
    ASSERT_LE(std::abs(static_cast<int>(base) - static_cast<int>(bits)), 128);
  }
}

TEST(Planes, HalfToFloat_AllCodes_EqualsHardware) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    ASSERT_EQ(std::bit_cast<uint32_t>(HalfToFloat(bits)), std::bit_cast<uint32_t>(_cvtsh_ss(bits)))
        << code;
  }
}

TEST(Planes, FloatToStoredHalf_AllHalves_AreExact) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    if ((bits & 0x7c00) == 0x7c00) continue;  // infinities and NaN have their own tests
    const StoredHalf stored = FloatToStoredHalf(HalfToFloat(bits));
    ASSERT_EQ(stored.bits, bits);
    ASSERT_EQ(stored.rounding, HalfRounding::kExactOrRounded);
  }
}

TEST(Planes, FloatToStoredHalf_FloatsOfAllExponents_RoundAsHardwareUpToSaturation) {
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t lower : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u,
                                 0xefffu, 0xf000u, 0xffffu}) {
      const auto value = std::bit_cast<float>(upper << 16 | lower);
      const StoredHalf stored = FloatToStoredHalf(value);
      const uint16_t hardware = HardwareHalf(value);
      if (std::isnan(value)) {
        ASSERT_EQ(stored.rounding, HalfRounding::kNan);
        ASSERT_TRUE(std::isnan(HalfToFloat(stored.bits)));
      } else if ((hardware & 0x7fff) == 0x7c00) {
        ASSERT_EQ(stored.rounding, HalfRounding::kSaturated);
        ASSERT_EQ(HalfToFloat(stored.bits), std::copysign(kHalfMax, value));
      } else {
        ASSERT_EQ(stored.rounding, HalfRounding::kExactOrRounded);
        ASSERT_EQ(stored.bits, hardware) << value;
      }
    }
  }
}

TEST(Planes, FloatToStoredHalf_AroundTheLargestHalf_SaturatesFrom65520On) {
  EXPECT_EQ(FloatToStoredHalf(65519.996f).rounding, HalfRounding::kExactOrRounded);
  EXPECT_EQ(FloatToStoredHalf(65520.0f).rounding, HalfRounding::kSaturated);
  EXPECT_EQ(HalfToFloat(FloatToStoredHalf(-std::numeric_limits<float>::infinity()).bits), -65504.0f);
}

TEST(NamedLayout, Offsets_EveryHeadDim_ArePermutationOfTheSlice) {
  for (const int head_dim : {32, 64, 96, 128, 160, 192, 224, 256}) {
    const auto bytes = static_cast<size_t>(2 * kBlockTokens * head_dim);
    std::vector<int> seen(bytes, 0);
    for (int token = 0; token < kBlockTokens; ++token) {
      for (int d = 0; d < head_dim; ++d) {
        ASSERT_LT(KOffset(token, d), bytes / 2);
        ASSERT_GE(VOffset(head_dim, token, d), bytes / 2);
        ASSERT_LT(VOffset(head_dim, token, d), bytes);
        ++seen[KOffset(token, d)];
        ++seen[VOffset(head_dim, token, d)];
      }
    }
    for (const int count : seen) ASSERT_EQ(count, 1) << head_dim;
  }
}

TEST(NamedLayout, KeyOffsets_StatedOrder_HoldsChannelPairsInHalvesOfTokens) {
  // d:t0-7, d+1:t0-7, d:t8-15, d+1:t8-15 (DESIGN 1).
  EXPECT_EQ(KOffset(0, 10), 5u * 32);
  EXPECT_EQ(KOffset(7, 10), 5u * 32 + 7);
  EXPECT_EQ(KOffset(0, 11), 5u * 32 + 8);
  EXPECT_EQ(KOffset(8, 10), 5u * 32 + 16);
  EXPECT_EQ(KOffset(15, 11), 5u * 32 + 31);
}

TEST(NamedLayout, OneUnpackEach_JoinsThePlanesInOrder) {
  // What every kernel does with a row of 32 bytes, here with the 256-bit instructions.
  alignas(32) uint8_t base[32];
  alignas(32) uint8_t residual[32];
  for (uint32_t g = 0; g < 2; ++g) {
    for (uint32_t j = 0; j < 16; ++j) {
      base[PairSwizzleRowOffset(g, j)] = static_cast<uint8_t>(g);
      residual[PairSwizzleRowOffset(g, j)] = static_cast<uint8_t>(j);
    }
  }
  const __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(base));
  const __m256i r = _mm256_load_si256(reinterpret_cast<const __m256i*>(residual));
  alignas(32) uint16_t group[2][16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(group[0]), _mm256_unpacklo_epi8(r, b));
  _mm256_store_si256(reinterpret_cast<__m256i*>(group[1]), _mm256_unpackhi_epi8(r, b));
  for (uint32_t g = 0; g < 2; ++g) {
    for (uint32_t j = 0; j < 16; ++j) EXPECT_EQ(group[g][j], g << 8 | j);
  }
}

TEST(Planes, SplitSlice_ThenJoin_RestoresTargetAndReadsBaseAsMidpoint) {
  for (const int head_dim : {32, 96, 128}) {
    const auto values = static_cast<size_t>(2 * kBlockTokens * head_dim);
    std::vector<uint16_t> in(values);
    for (size_t i = 0; i < values; ++i) in[i] = static_cast<uint16_t>(i * 40503u + 77u);
    std::vector<uint8_t> base(values), residual(values);
    SplitSlice(head_dim, in, absl::MakeSpan(base), absl::MakeSpan(residual));
    EXPECT_EQ(base[KOffset(3, 5)], BaseByte(in[static_cast<size_t>(3 * head_dim + 5)]));
    EXPECT_EQ(residual[VOffset(head_dim, 9, 31)],
              ResidualByte(in[static_cast<size_t>((16 + 9) * head_dim + 31)]));
    std::vector<uint16_t> out(values);
    JoinSlice(head_dim, base, residual, absl::MakeSpan(out));
    EXPECT_EQ(out, in);
    JoinSlice(head_dim, base, {}, absl::MakeSpan(out));
    for (size_t i = 0; i < values; ++i) ASSERT_EQ(out[i], JoinBase(BaseByte(in[i])));
  }
}

}  // namespace
}  // namespace kvt
