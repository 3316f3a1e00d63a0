// Scratch memory that a caller lends to an operation of kernels/cpu for one step. The operation
// neither keeps nor frees it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvt {

struct Workspace {
  uint8_t* data = nullptr;  // 64-byte aligned
  size_t bytes = 0;
};

}  // namespace kvt
