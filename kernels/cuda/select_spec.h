// What the sources of selection (select_*.cu) share: a layer's selecting heads as a kernel's
// parameter, and the checks of arguments.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/selection.h"

namespace kvt {

// Rows of one launch: they travel as its parameters, which may have 4 KiB.
inline constexpr size_t kSelectSegmentsPerLaunch = 64;
inline constexpr size_t kLaunchParamsBytesMax = 4096;
inline constexpr int kWarpLanes = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

struct SelectSpec {
  DigestHead heads[kDigestHeadsMax];
  int head_count;
  int head_dim;
  uint32_t head_bytes;
  uint32_t digest_bytes;
};

inline SelectSpec SelectSpecOf(const DigestSpec& spec, int head_dim) {
  SelectSpec of = {};
  std::copy(spec.heads.begin(), spec.heads.end(), of.heads);
  of.head_count = static_cast<int>(spec.heads.size());
  of.head_dim = head_dim;
  of.head_bytes = DigestHeadBytes(head_dim, spec.bits);
  of.digest_bytes = spec.Bytes(head_dim);
  return of;
}

// InvalidArgument naming `op` and what is wrong.
inline absl::Status ValidateSelectSpec(const char* op, const Geometry& geometry,
                                       const DigestSpec& spec) {
  const auto bad = [op](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat(op, ": ", what...));
  };
  if (geometry.head_dim <= 0 || geometry.head_dim % kDigestChannelsMultiple != 0 ||
      geometry.head_dim > kDigestHeadDimMax || geometry.kv_heads <= 0) {
    return bad("geometry ", geometry.ToString());
  }
  if (spec.bits < kDigestBitsMin || spec.bits > kDigestBitsMax) return bad("bits = ", spec.bits);
  if (spec.heads.empty() || static_cast<int>(spec.heads.size()) > kDigestHeadsMax) {
    return bad(spec.heads.size(), " selecting heads; 1 to ", kDigestHeadsMax);
  }
  for (const DigestHead& head : spec.heads) {
    if (head.kv_head < 0 || head.kv_head >= geometry.kv_heads) {
      return bad("kv_head = ", head.kv_head, " of ", geometry.kv_heads);
    }
    if (head.offset == nullptr || head.scale == nullptr) return bad("a head's channels are null");
  }
  return absl::OkStatus();
}

inline bool IsAligned(const void* pointer, uintptr_t to) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % to == 0;
}

}  // namespace kvt
