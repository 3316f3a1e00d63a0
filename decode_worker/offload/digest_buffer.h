// The digests of one sequence on the device: of each layer that is not dense, one a block, in order.
// Owner: the sequence; the device outlives it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/device.h"

namespace kvt {

class DigestBuffer {
 public:
  // layer_bytes[l]: of one block's digest in layer l, 0 where it is dense. ResourceExhausted.
  [[nodiscard]] static absl::StatusOr<DigestBuffer> Create(Device& device,
                                                           absl::Span<const uint32_t> layer_bytes,
                                                           int blocks) {
    DigestBuffer buffer;
    uint64_t bytes = 0;
    for (const uint32_t of_block : layer_bytes) {
      buffer.offsets_.push_back(bytes);
      bytes += LayerSpan(of_block, blocks);
    }
    KVT_ASSIGN_OR_RETURN(buffer.memory_, device.Allocate(bytes == 0 ? 64 : bytes));
    return buffer;
  }
  // What Create takes of the device.
  [[nodiscard]] static uint64_t BytesFor(absl::Span<const uint32_t> layer_bytes, int blocks) {
    uint64_t bytes = 0;
    for (const uint32_t of_block : layer_bytes) bytes += LayerSpan(of_block, blocks);
    return bytes == 0 ? 64 : bytes;
  }
  // Device address of block 0's.
  [[nodiscard]] uint8_t* Layer(int layer) const {
    return memory_.as<uint8_t>() + offsets_[static_cast<size_t>(layer)];
  }
  [[nodiscard]] uint64_t bytes() const { return memory_.bytes(); }

 private:
  static uint64_t LayerSpan(uint32_t of_block, int blocks) {
    return CeilDiv(uint64_t{of_block} * static_cast<uint64_t>(blocks), 64) * 64;
  }

  DeviceBuffer memory_;
  std::vector<uint64_t> offsets_;
};

}  // namespace kvt
