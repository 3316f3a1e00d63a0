// The tensors of a Llama-family folder as the matrix products want them. Used while loading only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/model/model_config.h"
#include "kernels/model/safetensors.h"
#include "kernels/ops.h"

namespace kvt {

// Reads tensors by name and converts what the products cannot take as it is (f16, misaligned).
// Converted copies live as long as the reader. Not thread-safe.
class WeightLoader {
 public:
  explicit WeightLoader(const Safetensors& tensors) : tensors_(tensors) {}

  // [out][in]; errors name file and tensor.
  [[nodiscard]] absl::StatusOr<WeightPart> Matrix(absl::string_view name, int out, int in);
  // [size], as f32.
  [[nodiscard]] absl::StatusOr<std::vector<float>> Vector(absl::string_view name, int size);
  // Lets converted copies go.
  void Release();

 private:
  const Safetensors& tensors_;
  std::vector<std::vector<float>> floats_;
  std::vector<std::vector<uint16_t>> halves_;
};

}  // namespace kvt
