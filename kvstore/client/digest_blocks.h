// How the digests of a block lie in the tier (docs/decisions/0007): as a block of a geometry of its
// own, in the same stores. The digests of the block's selecting layers are joined in layer order,
// padded with zeros to two equal halves of whole slices; the first half is the BASE record, the
// second the RESIDUAL record. The key is the one of the block's tokens in a domain that has this
// geometry, the version of the digests' layout and the calibration's id, so digests of another layout
// or a stale calibration are not found at all: their reader makes them again from the planes.
//
// Pure; values, thread-safe to read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/layout/geometry.h"
#include "kvstore/index/block_key.h"

namespace kvt {

class DigestLayout {
 public:
  // layer_bytes[l]: digest bytes of one block in layer l, 0 where the layer is dense. The id is the
  // calibration's. InvalidArgument: no layer has digests, or they do not fit a geometry.
  [[nodiscard]] static absl::StatusOr<DigestLayout> Create(absl::string_view calibration_id,
                                                           std::vector<uint32_t> layer_bytes);

  [[nodiscard]] const std::string& calibration_id() const { return calibration_id_; }
  // One layer, head_dim 32: records of kv_heads x 1,024 bytes.
  [[nodiscard]] const Geometry& geometry() const { return geometry_; }
  [[nodiscard]] int layers() const { return static_cast<int>(layer_bytes_.size()); }
  // Within the joined digest of a block.
  [[nodiscard]] uint32_t LayerOffset(int layer) const { return offsets_[static_cast<size_t>(layer)]; }
  [[nodiscard]] uint32_t LayerBytes(int layer) const {
    return layer_bytes_[static_cast<size_t>(layer)];
  }
  // Without the padding.
  [[nodiscard]] uint32_t DigestBytes() const { return digest_bytes_; }
  // With it: both records. The RESIDUAL record begins at half of it.
  [[nodiscard]] uint32_t BlockBytes() const { return kPlanes * geometry_.RecordBytes(); }

  // Domain of the digests' keys, from that of the planes of the same sequence.
  [[nodiscard]] KeyDomain Domain(const KeyDomain& planes) const;

 private:
  DigestLayout() = default;

  std::string calibration_id_;
  Geometry geometry_;
  std::vector<uint32_t> layer_bytes_;
  std::vector<uint32_t> offsets_;
  uint32_t digest_bytes_ = 0;
};

}  // namespace kvt
