// Byte counts and their printing.
#pragma once

#include <cstdint>
#include <string>

namespace kvt {

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;
inline constexpr uint64_t kGiB = 1024 * kMiB;

// "1.50 GiB", "12.0 MiB", "512 B".
std::string FormatBytes(uint64_t bytes);

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr uint64_t CeilDiv(uint64_t value, uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace kvt
