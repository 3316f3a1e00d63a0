// Counter-based random numbers: a pure function of (seed, counter), so that sampling depends on the
// seed and the position alone (DESIGN 2.5). The mixer is SplitMix64's finalizer (Steele, Lea,
// Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), applied twice.
#pragma once

#include <cstdint>

namespace kvt {

constexpr uint64_t Mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// 64 uniform bits for (seed, counter).
constexpr uint64_t CounterRandom(uint64_t seed, uint64_t counter) {
  return Mix64(Mix64(seed + 0x9e3779b97f4a7c15ull) + counter * 0x9e3779b97f4a7c15ull +
               0x632be59bd9b4e019ull);
}

// Uniform in [0, 1), 53 bits.
constexpr double CounterUniform(uint64_t seed, uint64_t counter) {
  return static_cast<double>(CounterRandom(seed, counter) >> 11) * 0x1.0p-53;
}

// A sequence of draws, for tests and identifiers. Not thread-safe.
class Random {
 public:
  explicit Random(uint64_t seed) : seed_(seed) {}
  uint64_t Next() { return CounterRandom(seed_, counter_++); }
  // Uniform in [0, n), n > 0.
  uint64_t Below(uint64_t n) { return Next() % n; }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }
  // Seeded from the kernel's entropy.
  static Random FromEntropy();

 private:
  uint64_t seed_;
  uint64_t counter_ = 0;
};

}  // namespace kvt
