#include "kvstore/client/digest_blocks.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/layout/digest.h"
#include "kvstore/index/digest_geometry.h"

namespace kvt {

absl::StatusOr<DigestLayout> DigestLayout::Create(absl::string_view calibration_id,
                                                  std::vector<uint32_t> layer_bytes) {
  DigestLayout layout;
  layout.calibration_id_ = std::string(calibration_id);
  uint64_t bytes = 0;
  for (const uint32_t layer : layer_bytes) {
    layout.offsets_.push_back(static_cast<uint32_t>(std::min<uint64_t>(bytes, UINT32_MAX)));
    bytes += layer;
  }
  if (bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("calibration ", calibration_id, ": every layer is dense: nothing is selected"));
  }
  Geometry geometry = DigestGeometry(1);
  const uint64_t pair = uint64_t{kPlanes} * geometry.SliceBytes();
  const uint64_t slices = (bytes + pair - 1) / pair;
  geometry.kv_heads = static_cast<int>(std::min<uint64_t>(slices, INT32_MAX));
  if (!geometry.Validate().ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("calibration ", calibration_id, ": ", bytes,
                     " bytes of digests a block, more than a record holds; calibrate with fewer "
                     "selecting heads or bits"));
  }
  layout.geometry_ = geometry;
  layout.layer_bytes_ = std::move(layer_bytes);
  layout.digest_bytes_ = static_cast<uint32_t>(bytes);
  return layout;
}

KeyDomain DigestLayout::Domain(const KeyDomain& planes) const {
  KeyDomain domain = planes;
  domain.geometry = geometry_;
  domain.salt = absl::StrCat("digest", kDigestLayoutVersion, ":", calibration_id_, ":", planes.salt);
  return domain;
}

}  // namespace kvt
