#include "kernels/layout/checksum.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/layout/checksum_xxh3.h"

namespace kvt {
namespace {

// `size` bytes at an address aligned to 64, plus `skew`.
class Bytes {
 public:
  Bytes(size_t size, size_t skew, uint64_t seed) : memory_(size + skew + 64) {
    const auto base = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = memory_.data() + ((base + 63) / 64 * 64 - base) + skew;
    Random random(seed);
    for (size_t i = 0; i < size; ++i) data_[i] = static_cast<std::byte>(random.Next());
  }
  std::byte* data() { return data_; }

 private:
  std::vector<std::byte> memory_;
  std::byte* data_;
};

uint64_t Reference(const std::byte* bytes, size_t size, uint64_t seed) {
  return Mix64(seed ^ XXH3_64bits(bytes, size));
}

TEST(SliceChecksum, EverySizeAndAlignment_EqualsLibrary) {
  for (size_t size = 1; size <= 8300; size += size < 1200 ? 1 : 97) {
    Bytes bytes(size, size % 64, size);
    EXPECT_EQ(SliceChecksum(bytes.data(), size, 42), Reference(bytes.data(), size, 42)) << size;
  }
  for (size_t size = 64; size <= 64 * 1024; size += 64) {
    Bytes bytes(size, 0, size);
    ASSERT_EQ(SliceChecksum(bytes.data(), size, 7), Reference(bytes.data(), size, 7)) << size;
  }
}

TEST(CopyWithChecksum, EverySizeAndMode_CopiesAndEqualsLibrary) {
  for (size_t size = 64; size <= 16 * 1024; size += 64) {
    for (const bool streaming : {false, true}) {
      // The source of a streaming copy may be unaligned: a network buffer.
      Bytes from(size, size / 64 % 64, size + 1);
      Bytes to(size + 64, 0, 5);
      std::vector<std::byte> guard(to.data() + size, to.data() + size + 64);
      const void* ahead = size % 128 == 0 ? from.data() + size : nullptr;
      const uint64_t sum = CopyWithChecksum(to.data(), from.data(), size, 9, streaming, ahead);
      StreamingFence();
      ASSERT_EQ(sum, Reference(from.data(), size, 9)) << size;
      ASSERT_EQ(0, std::memcmp(to.data(), from.data(), size)) << size;
      ASSERT_EQ(0, std::memcmp(to.data() + size, guard.data(), 64)) << size;
    }
  }
}

TEST(CopyBytes, EverySizeAndMode_Copies) {
  for (size_t size = 64; size <= 16 * 1024; size += 64) {
    for (const bool streaming : {false, true}) {
      Bytes from(size, size / 64 % 64, size + 1);
      Bytes to(size + 64, 0, 5);
      std::vector<std::byte> guard(to.data() + size, to.data() + size + 64);
      CopyBytes(to.data(), from.data(), size, streaming, size % 128 == 0 ? from.data() : nullptr);
      StreamingFence();
      ASSERT_EQ(0, std::memcmp(to.data(), from.data(), size)) << size;
      ASSERT_EQ(0, std::memcmp(to.data() + size, guard.data(), 64)) << size;
    }
  }
}

TEST(HashCopy, BothInstructionSets_AreEqual) {
  if (!__builtin_cpu_supports("avx512f")) GTEST_SKIP() << "no AVX-512F here";
  for (size_t size = xxh3::kShortestBytes; size <= 8192; size += 64) {
    Bytes from(size, 1, size);
    Bytes to(size, 0, 1);
    const uint64_t wide =
        xxh3::HashCopyAvx512(to.data(), from.data(), size, xxh3::CopyMode::kStreaming, nullptr);
    ASSERT_EQ(0, std::memcmp(to.data(), from.data(), size));
    Bytes again(size, 0, 2);
    ASSERT_EQ(wide, xxh3::HashCopyAvx2(again.data(), from.data(), size, xxh3::CopyMode::kStreaming,
                                       nullptr));
    ASSERT_EQ(0, std::memcmp(again.data(), from.data(), size));
    Bytes third(size, 0, 3);
    xxh3::CopyAvx2(third.data(), from.data(), size, xxh3::CopyMode::kCached, nullptr);
    ASSERT_EQ(0, std::memcmp(third.data(), from.data(), size));
  }
}

TEST(SliceChecksum, AnyBitFlipped_Differs) {
  Bytes bytes(2048, 0, 3);
  const uint64_t sum = SliceChecksum(bytes.data(), 2048, 1);
  for (int bit = 0; bit < 2048 * 8; ++bit) {
    bytes.data()[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    ASSERT_NE(SliceChecksum(bytes.data(), 2048, 1), sum) << bit;
    bytes.data()[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

TEST(ChecksumSeed, KeyPlaneAndPlace_AllMatter) {
  std::set<uint64_t> seeds;
  int count = 0;
  for (uint64_t key = 0; key < 16; ++key) {
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      for (uint32_t slice = 0; slice < 90; ++slice, ++count) {
        seeds.insert(ChecksumSeed(key, plane, slice));
      }
    }
  }
  EXPECT_EQ(seeds.size(), static_cast<size_t>(count));
}

}  // namespace
}  // namespace kvt
