#include "kernels/model/weights.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

float FloatFromF16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 0x1f;
  const uint32_t mantissa = h & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float value = std::ldexp(static_cast<float>(mantissa), -24);
  return sign != 0 ? -value : value;
}

float FloatAt(const TensorView& view, size_t i) {
  switch (view.type) {
    case TensorType::kF32: {
      float value;
      std::memcpy(&value, view.bytes.data() + i * 4, 4);
      return value;
    }
    case TensorType::kF16:
    case TensorType::kBf16: {
      uint16_t bits;
      std::memcpy(&bits, view.bytes.data() + i * 2, 2);
      return view.type == TensorType::kF16
                 ? FloatFromF16(bits)
                 : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
    case TensorType::kOther:
      break;
  }
  KVT_CHECK(false, "tensor type ", view.type_name);
  return 0;
}

bool Aligned(const void* data, size_t to) { return reinterpret_cast<uintptr_t>(data) % to == 0; }

}  // namespace

absl::StatusOr<WeightPart> WeightLoader::Matrix(absl::string_view name, int out, int in) {
  KVT_ASSIGN_OR_RETURN(const TensorView view, tensors_.Find(name, {out, in}));
  WeightPart part;
  part.out_features = out;
  const size_t count = static_cast<size_t>(out) * static_cast<size_t>(in);
  if (view.type == TensorType::kBf16) {
    if (Aligned(view.bytes.data(), 2)) {
      part.bf16 = reinterpret_cast<const uint16_t*>(view.bytes.data());
    } else {
      std::vector<uint16_t>& copy = halves_.emplace_back(count);
      std::memcpy(copy.data(), view.bytes.data(), count * 2);
      part.bf16 = copy.data();
    }
    return part;
  }
  if (view.type == TensorType::kF32 && Aligned(view.bytes.data(), 4)) {
    part.f32 = reinterpret_cast<const float*>(view.bytes.data());
    return part;
  }
  std::vector<float>& copy = floats_.emplace_back(count);
  for (size_t i = 0; i < count; ++i) copy[i] = FloatAt(view, i);
  part.f32 = copy.data();
  return part;
}

absl::StatusOr<std::vector<float>> WeightLoader::Vector(absl::string_view name, int size) {
  KVT_ASSIGN_OR_RETURN(const TensorView view, tensors_.Find(name, {size}));
  std::vector<float> values(static_cast<size_t>(size));
  for (size_t i = 0; i < values.size(); ++i) values[i] = FloatAt(view, i);
  return values;
}

void WeightLoader::Release() {
  floats_.clear();
  halves_.clear();
}

}  // namespace kvt
