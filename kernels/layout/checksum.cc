#include "kernels/layout/checksum.h"

#include <immintrin.h>
#include <xxhash.h>

#include <cstring>

#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/layout/checksum_xxh3.h"

namespace kvt {
namespace {

using xxh3::CopyMode;

const bool kHasAvx512 = __builtin_cpu_supports("avx512f") != 0;

// XXH3-64 of src, copied to dst on the way.
uint64_t HashCopy(std::byte* dst, const std::byte* src, size_t size, CopyMode mode,
                  const void* ahead) {
  if (size < xxh3::kShortestBytes || size % xxh3::kStripeBytes != 0) {
    if (mode != CopyMode::kNone) std::memcpy(dst, src, size);
    return XXH3_64bits(src, size);
  }
  const auto* next = static_cast<const std::byte*>(ahead);
  return kHasAvx512 ? xxh3::HashCopyAvx512(dst, src, size, mode, next)
                    : xxh3::HashCopyAvx2(dst, src, size, mode, next);
}

void CheckCopy(const void* dst, size_t size, bool streaming) {
  KVT_CHECK(size % 64 == 0, "size ", size);
  KVT_CHECK(!streaming || reinterpret_cast<uintptr_t>(dst) % 64 == 0, "unaligned streaming copy");
}

}  // namespace

uint64_t ChecksumSeed(uint64_t key_hash, Plane plane, uint32_t slice_index) {
  return Mix64(key_hash ^ Mix64((static_cast<uint64_t>(plane) << 32) + slice_index + 1));
}

uint64_t SliceChecksum(const void* bytes, size_t size, uint64_t seed) {
  return Mix64(seed ^ HashCopy(nullptr, static_cast<const std::byte*>(bytes), size, CopyMode::kNone,
                               nullptr));
}

uint64_t CopyWithChecksum(void* dst, const void* src, size_t size, uint64_t seed, bool streaming,
                          const void* ahead) {
  CheckCopy(dst, size, streaming);
  return Mix64(seed ^ HashCopy(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src),
                               size, streaming ? CopyMode::kStreaming : CopyMode::kCached, ahead));
}

void CopyBytes(void* dst, const void* src, size_t size, bool streaming, const void* ahead) {
  CheckCopy(dst, size, streaming);
  const CopyMode mode = streaming ? CopyMode::kStreaming : CopyMode::kCached;
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const auto* next = static_cast<const std::byte*>(ahead);
  if (kHasAvx512) {
    xxh3::CopyAvx512(to, from, size, mode, next);
  } else {
    xxh3::CopyAvx2(to, from, size, mode, next);
  }
}

void StreamingFence() { _mm_sfence(); }

}  // namespace kvt
