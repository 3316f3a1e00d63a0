// Digests of blocks on their way from or to the tier: there the digests of a block's layers lie together
// (kvstore/client/digest_blocks.h), on the device those of a layer. Owner: the transfer of a
// sequence, on a host-addressable device.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "decode_worker/offload/digest_buffer.h"
#include "kernels/device.h"
#include "kvstore/client/digest_blocks.h"

namespace kvt {

class DigestStage {
 public:
  // Room for that many blocks. ResourceExhausted.
  [[nodiscard]] static absl::StatusOr<DigestStage> Create(Device& device, const DigestLayout& layout,
                                                          int blocks);
  // Where the two records of entry `index` lie.
  [[nodiscard]] std::byte* Base(int index) const;
  [[nodiscard]] std::byte* Residual(int index) const;
  // Copies entry `index` to block `block` of the sequence; nothing on the device reads that yet.
  void CopyTo(const DigestBuffer& digests, int index, int block) const;
  // The other way: nothing on the device writes that block's any more.
  void CopyFrom(const DigestBuffer& digests, int block, int index) const;

 private:
  explicit DigestStage(const DigestLayout& layout) : layout_(&layout) {}

  const DigestLayout* layout_;
  DeviceBuffer memory_;
};

}  // namespace kvt
