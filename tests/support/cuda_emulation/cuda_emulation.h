// CUDA's kernel language on the host, as far as kernels/cuda uses it, so that the kernels run where
// no device is: sources in CUDA are compiled as C++ with this folder's cuda_runtime.h. Every thread
// of a thread block is a fiber, one of them runs at a time, and whoever waits for its warp or its
// thread block gives way; thread blocks run one after the other. So results are a device's, race
// conditions and memory spaces are not shown, and time means nothing.
//
// Warp operations take the whole warp, as all of ours do. One thread of the host launches.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x, y, z;
  explicit(false) dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace kvt::cuda_emulation {

inline constexpr unsigned kWarp = 32;

// Of the fiber that runs.
struct Here {
  dim3 thread{0, 0, 0}, block{0, 0, 0}, grid;
};
extern Here here;

// Runs `body` for every thread of the grid. `threads` is a multiple of kWarp. A fiber that waits
// for others which never come is a bug that ends the program.
void Launch(dim3 grid, unsigned threads, const std::function<void()>& body);

void AwaitThreadBlock();
// What each lane of the warp gave; every lane calls it.
std::array<uint64_t, kWarp> Exchange(uint64_t mine);

template <typename T>
std::array<T, kWarp> ExchangeAs(T mine) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &mine, sizeof(T));
  const std::array<uint64_t, kWarp> all = Exchange(bits);
  std::array<T, kWarp> values;
  for (unsigned i = 0; i < kWarp; ++i) std::memcpy(&values[i], &all[i], sizeof(T));
  return values;
}
inline unsigned Lane() { return here.thread.x % kWarp; }

}  // namespace kvt::cuda_emulation

inline const dim3& threadIdx = kvt::cuda_emulation::here.thread;
inline const dim3& blockIdx = kvt::cuda_emulation::here.block;
inline const dim3& gridDim = kvt::cuda_emulation::here.grid;

inline void __syncthreads() { kvt::cuda_emulation::AwaitThreadBlock(); }
inline void __syncwarp() { (void)kvt::cuda_emulation::Exchange(0); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  const unsigned from = kvt::cuda_emulation::Lane() ^ static_cast<unsigned>(lanes);
  return kvt::cuda_emulation::ExchangeAs(value)[from];
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const auto up = static_cast<unsigned>(distance);
  const unsigned lane = kvt::cuda_emulation::Lane();
  return kvt::cuda_emulation::ExchangeAs(value)[lane < up ? lane : lane - up];
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  T most = value;
  for (const T other : kvt::cuda_emulation::ExchangeAs(value)) most = other > most ? other : most;
  return most;
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  unsigned votes = 0;
  const auto all = kvt::cuda_emulation::ExchangeAs<uint32_t>(vote ? 1 : 0);
  for (unsigned i = 0; i < all.size(); ++i) votes |= all[i] << i;
  return votes;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}
[[noreturn]] inline void __trap() { __builtin_trap(); }
template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
