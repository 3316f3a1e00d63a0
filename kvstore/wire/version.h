// Wire versions. A node speaks its own version and the one before; a pair of nodes uses the highest
// that both speak, or refuses at attach naming both sides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace kvt {

inline constexpr uint32_t kWireVersion = 1;
inline constexpr uint32_t kWireVersionMin = 1;  // kWireVersion - 1 once there is a second

struct WireVersionRange {
  uint32_t min = kWireVersionMin;
  uint32_t max = kWireVersion;
  friend bool operator==(const WireVersionRange&, const WireVersionRange&) = default;
};

// The version that both speak; none when the ranges do not meet.
constexpr std::optional<uint32_t> CommonWireVersion(WireVersionRange a, WireVersionRange b) {
  const uint32_t top = std::min(a.max, b.max);
  return top >= std::max(a.min, b.min) ? std::optional<uint32_t>(top) : std::nullopt;
}

}  // namespace kvt
