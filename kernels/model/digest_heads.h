// The selecting heads of a calibration on a device: what MakeDigest and ScoreBlocks take as DigestSpec.
// Owner: a worker's composition root or engine; the device outlives it. Constant after Create,
// thread-safe to read.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "kernels/select/calibration.h"
#include "kernels/selection.h"

namespace kvt {

class DigestHeads {
 public:
  // Copies the channels to the device and waits for it. ResourceExhausted.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<DigestHeads>> Create(
      Device& device, const Calibration& calibration);

  [[nodiscard]] int layers() const { return static_cast<int>(heads_.size()); }
  // The layer attends to everything and has no digests.
  [[nodiscard]] bool dense(int layer) const { return heads_[static_cast<size_t>(layer)].empty(); }
  // Refers to this object. Requires !dense(layer).
  [[nodiscard]] DigestSpec Spec(int layer) const {
    return {bits_, heads_[static_cast<size_t>(layer)]};
  }
  // Of one layer.
  [[nodiscard]] int heads_max() const { return heads_max_; }

 private:
  DigestHeads() = default;

  int bits_ = 4;
  int heads_max_ = 0;
  std::vector<std::vector<DigestHead>> heads_;  // by layer, into channels_
  DeviceBuffer channels_;
};

}  // namespace kvt
