#include "kernels/layout/geometry.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/random.h"

namespace kvt {

absl::Status Geometry::Validate() const {
  if (layers < 1 || layers > 256) {
    return absl::InvalidArgumentError(absl::StrCat("geometry: layers = ", layers,
                                                   " is outside [1, 256]"));
  }
  if (kv_heads < 1 || kv_heads > 128) {
    return absl::InvalidArgumentError(absl::StrCat("geometry: kv_heads = ", kv_heads,
                                                   " is outside [1, 128]"));
  }
  if (head_dim < 32 || head_dim > 256 || head_dim % 32 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "geometry: head_dim = ", head_dim, " is not a multiple of 32 in [32, 256]"));
  }
  return absl::OkStatus();
}

std::string Geometry::ToString() const {
  absl::string_view name = "?";
  switch (layout) {
    case NamedLayout::kPairSwizzle: name = "pair-swizzle"; break;
  }
  return absl::StrCat("L", layers, " H", kv_heads, " D", head_dim, " ", name);
}

uint64_t Geometry::Fingerprint() const {
  uint64_t hash = Mix64(0x6b76746964650001ull);  // "kvtide", version 1
  for (const uint64_t part : {static_cast<uint64_t>(layers), static_cast<uint64_t>(kv_heads),
                              static_cast<uint64_t>(head_dim), static_cast<uint64_t>(layout),
                              static_cast<uint64_t>(kBlockTokens)}) {
    hash = Mix64(hash ^ (part + 0x9e3779b97f4a7c15ull));
  }
  return hash;
}

}  // namespace kvt
