// A packed matrix as the CPU's operations see it: one implementation by f32 multiply-adds
// (fma_matrix.h), one through oneDNN (onednn_matrix.h).
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/mutex.h"
#include "kernels/cpu/thread_team.h"
#include "kernels/device.h"
#include "kernels/ops.h"

namespace kvt {

class CpuMatrix : public PackedMatrix {
 public:
  [[nodiscard]] int in_features() const override { return in_features_; }
  [[nodiscard]] int out_features() const override { return out_features_; }
  [[nodiscard]] ComputeType compute() const override { return compute_; }
  [[nodiscard]] const std::string& implementation() const override { return implementation_; }
  [[nodiscard]] MatmulEpilogue epilogue_kind() const { return epilogue_; }

  // Scratch of all members for up to `rows` rows.
  [[nodiscard]] virtual size_t WorkspaceBytes(int rows) const = 0;
  // Called by every member.
  virtual void Multiply(const MatmulArgs& args, TeamMember& member) const = 0;

 protected:
  CpuMatrix(ComputeType compute, MatmulEpilogue epilogue, int in_features, int out_features)
      : compute_(compute),
        epilogue_(epilogue),
        in_features_(in_features),
        out_features_(out_features) {}
  void set_implementation(std::string name) { implementation_ = std::move(name); }

 private:
  const ComputeType compute_;
  const MatmulEpilogue epilogue_;
  const int in_features_;
  const int out_features_;
  std::string implementation_;
};

// Memory of packed weights, cut from chunks on huge pages: small matrices beside each other, so that
// the hardware follows the weights of a step as one stream. Thread-safe.
class WeightArena {
 public:
  explicit WeightArena(Device& device) : device_(device) {}

  struct Piece {
    uint8_t* data = nullptr;  // zeroed, 64-byte aligned
    std::shared_ptr<DeviceBuffer> chunk;
  };
  // ResourceExhausted.
  [[nodiscard]] absl::StatusOr<Piece> Take(size_t bytes);

 private:
  Device& device_;
  Mutex mutex_;
  std::shared_ptr<DeviceBuffer> chunk_ ABSL_GUARDED_BY(mutex_);
  size_t used_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One weight (row `out`, column `in`) of stacked parts, whatever their type.
class WeightReader {
 public:
  WeightReader(const WeightPart& part, int in_features) : part_(part), in_(in_features) {}
  [[nodiscard]] float At(int out, int in) const;
  // Rounded to nearest even from f32.
  [[nodiscard]] uint16_t Bf16At(int out, int in) const;

 private:
  const WeightPart part_;
  const size_t in_;
};

[[nodiscard]] uint16_t RoundToBf16(float value);

}  // namespace kvt
