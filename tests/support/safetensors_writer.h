// Writes safetensors files for tests, well formed or not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvt {

struct TestTensor {
  std::string name;
  std::string dtype;  // "F32", "BF16", ...
  std::vector<int64_t> shape;
  std::string bytes;
};

// Header length, header, data: no check of anything.
std::string SafetensorsFile(const std::string& header, const std::string& data);

// The tensors one behind the other.
std::string SafetensorsFile(const std::vector<TestTensor>& tensors);

}  // namespace kvt
