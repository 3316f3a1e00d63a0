// XXH3-64 with its default secret, as published (xxHash 0.8, XXH3_hashLong_64b), for inputs that
// are whole 64-byte stripes and longer than 240 bytes: the constants, and the steps that do not
// depend on the instruction set. The accumulation is written once per instruction set, fused with a
// copy.
//
//   acc[8] := init
//   for each stripe s of 64 bytes, i = its number within its block of 16 stripes:
//     acc += swap64(stripe) + lo32(stripe ^ secret[8i..]) * hi32(stripe ^ secret[8i..])
//     after the 16th stripe of a block, unless it is the input's last one:
//       acc := (acc ^ acc >> 47 ^ secret[128..]) * prime32_1
//   The input's last stripe takes secret[121..] whatever its number.
//   hash := merge(acc, secret[11..], length * prime64_1)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvt::xxh3 {

inline constexpr size_t kStripeBytes = 64;
inline constexpr size_t kBlockStripes = 16;
inline constexpr size_t kShortestBytes = 256;  // the shortest input of this form
inline constexpr size_t kScrambleSecret = 128;
inline constexpr size_t kLastStripeSecret = 121;
inline constexpr size_t kMergeSecret = 11;
inline constexpr uint32_t kPrime32_1 = 0x9E3779B1u;
inline constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ull;

alignas(64) inline constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

alignas(64) inline constexpr uint64_t kInit[8] = {
    0xC2B2AE3Dull,         0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
    0x85EBCA77C2B2AE63ull, 0x85EBCA77ull,         0x27D4EB2F165667C5ull, 0x9E3779B1ull};

inline uint64_t Merge(const uint64_t acc[8], uint64_t length) {
  uint64_t result = length * kPrime64_1;
  for (int i = 0; i < 4; ++i) {
    uint64_t secret[2];
    std::memcpy(secret, kSecret + kMergeSecret + 16 * i, 16);
    const auto product = static_cast<unsigned __int128>(acc[2 * i] ^ secret[0]) *
                         static_cast<unsigned __int128>(acc[2 * i + 1] ^ secret[1]);
    result += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  result ^= result >> 37;
  result *= 0x165667919E3779F9ull;
  return result ^ (result >> 32);
}

// What a copy-and-hash pass does with each stripe.
enum class CopyMode { kNone, kCached, kStreaming };

// XXH3-64 of src[0, size), copied to dst on the way. size: whole stripes, >= kShortestBytes.
// ahead: null, or `size` bytes that are prefetched in step with the copy (any address: a prefetch
// does not fault). The AVX-512 ones may be called only where the processor has AVX-512F.
uint64_t HashCopyAvx2(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
                      const std::byte* ahead);
uint64_t HashCopyAvx512(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
                        const std::byte* ahead);
void CopyAvx2(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
              const std::byte* ahead);
void CopyAvx512(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
                const std::byte* ahead);

}  // namespace kvt::xxh3
