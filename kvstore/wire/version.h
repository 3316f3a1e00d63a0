// Wire versions. A node speaks its own version and the one before; a pair of nodes uses the highest
// that both speak, or refuses at attach naming both sides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace kvt {

// 2: verdicts `on disk` and `expired` on the data plane, and the calls that came with spilling.
inline constexpr uint32_t kWireVersion = 2;
inline constexpr uint32_t kWireVersionMin = 1;
static_assert(kWireVersion - kWireVersionMin <= 1);

// What a node claims to speak. The default is the truth; tests play older and newer peers.
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
