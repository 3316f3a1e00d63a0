#include "tests/bench/roofline.h"

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace kvt {
namespace {

constexpr size_t kReadBytes = size_t{512} << 20;
constexpr int kRepeats = 5;

double Seconds(const std::chrono::steady_clock::time_point& start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

#define KVT_TWELVE(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)

// Each loop issues twelve independent instructions; registers hold zeros.
void FmaAvx512(int64_t loops) {
  for (int64_t i = 0; i < loops; ++i) {
#define KVT_OP(k) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" #k "\n"
    __asm__ volatile(KVT_TWELVE(KVT_OP)::: "memory");
#undef KVT_OP
  }
}
void FmaAvx2(int64_t loops) {
  for (int64_t i = 0; i < loops; ++i) {
#define KVT_OP(k) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #k "\n"
    __asm__ volatile(KVT_TWELVE(KVT_OP)::: "memory");
#undef KVT_OP
  }
}
void Bf16Dot(int64_t loops) {
  for (int64_t i = 0; i < loops; ++i) {
#define KVT_OP(k) "vdpbf16ps %%zmm30, %%zmm31, %%zmm" #k "\n"
    __asm__ volatile(KVT_TWELVE(KVT_OP)::: "memory");
#undef KVT_OP
  }
}

// Work per second over threads that run `body(thread)` at once; the best of several.
template <typename Body>
double Best(int threads, double work, Body body) {
  double best = 0;
  for (int r = 0; r < kRepeats; ++r) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back([&body, t] { body(t); });
    body(0);
    for (std::thread& other : others) other.join();
    best = std::max(best, work / Seconds(start));
  }
  return best;
}

}  // namespace

double PeakF32Gflops(int threads) {
  constexpr int64_t kLoops = 4'000'000;
  const bool avx512 = __builtin_cpu_supports("avx512f");
  const double flops = (avx512 ? 32.0 : 16.0) * 12 * kLoops * threads;
  return Best(threads, flops, [avx512](int) { avx512 ? FmaAvx512(kLoops) : FmaAvx2(kLoops); }) / 1e9;
}

double PeakBf16Gflops(int threads) {
  if (!__builtin_cpu_supports("avx512bf16")) return 0;
  constexpr int64_t kLoops = 2'000'000;
  return Best(threads, 64.0 * 12 * kLoops * threads, [](int) { Bf16Dot(kLoops); }) / 1e9;
}

double PeakReadGbps(int threads) {
  void* raw = mmap(nullptr, kReadBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return 0;
  madvise(raw, kReadBytes, MADV_HUGEPAGE);
  std::memset(raw, 1, kReadBytes);
  const uint8_t* data = static_cast<const uint8_t*>(raw);
  const double gbps = Best(threads, static_cast<double>(kReadBytes), [&](int t) {
    const size_t share = kReadBytes / static_cast<size_t>(threads);
    const uint8_t* p = data + share * static_cast<size_t>(t);
    __m256i sum[4] = {};
    for (size_t i = 0; i + 128 <= share; i += 128) {
      for (int k = 0; k < 4; ++k) {
        sum[k] = _mm256_add_epi64(
            sum[k], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 32 * k)));
      }
    }
    volatile int64_t sink = _mm256_extract_epi64(
        _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3])), 0);
    (void)sink;
  }) / 1e9;
  munmap(raw, kReadBytes);
  return gbps;
}

}  // namespace kvt
