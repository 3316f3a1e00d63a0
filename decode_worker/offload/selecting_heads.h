// A calibration on the device: which heads select in each layer, with the scales of their digests.
// Owner: the composition root or a test. Immutable after Create; the device outlives it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/select/calibration.h"
#include "kernels/selection.h"

namespace kvt {

class SelectingHeads {
 public:
  // ResourceExhausted. Synchronous, for start-up.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<SelectingHeads>> Create(
      Device& device, Calibration calibration);

  [[nodiscard]] const Calibration& calibration() const { return calibration_; }
  [[nodiscard]] int layers() const { return static_cast<int>(heads_.size()); }
  [[nodiscard]] bool dense(int layer) const { return heads_[static_cast<size_t>(layer)].empty(); }
  // Of a layer that is not dense; valid as long as this object.
  [[nodiscard]] DigestSpec Spec(int layer) const {
    return {calibration_.bits, heads_[static_cast<size_t>(layer)]};
  }
  // Bytes of one block's digest in a layer; 0 where dense.
  [[nodiscard]] uint32_t DigestBytes(int layer) const {
    return Spec(layer).Bytes(calibration_.geometry.head_dim);
  }
  // Most selecting heads of a layer.
  [[nodiscard]] int heads_max() const;

 private:
  explicit SelectingHeads(Calibration calibration) : calibration_(std::move(calibration)) {}

  const Calibration calibration_;
  DeviceBuffer channels_;
  std::vector<std::vector<DigestHead>> heads_;  // by layer, into channels_
};

// The digests of one sequence: of each layer that is not dense, one a block, in order.
class DigestBuffer {
 public:
  // ResourceExhausted.
  [[nodiscard]] static absl::StatusOr<DigestBuffer> Create(Device& device,
                                                           const SelectingHeads& heads, int blocks);
  // Device address of block 0's.
  [[nodiscard]] uint8_t* Layer(int layer) const {
    return memory_.as<uint8_t>() + offsets_[static_cast<size_t>(layer)];
  }
  [[nodiscard]] uint64_t bytes() const { return memory_.bytes(); }

 private:
  DeviceBuffer memory_;
  std::vector<size_t> offsets_;
};

}  // namespace kvt
