#include "kernels/cpu/cpu_matrix.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/base/units.h"

namespace kvt {
namespace {

// Chunks double from the first to the second size: a small model does not take a large one's.
constexpr size_t kFirstChunkBytes = 2 * kMiB;
constexpr size_t kChunkBytesMax = 64 * kMiB;

}  // namespace

absl::StatusOr<WeightArena::Piece> WeightArena::Take(size_t bytes) {
  const size_t size = RoundUp(bytes, 64);
  MutexLock lock(mutex_);
  if (chunk_ == nullptr || chunk_->bytes() - used_ < size) {
    const size_t wanted =
        chunk_ == nullptr ? kFirstChunkBytes : std::min<size_t>(2 * chunk_->bytes(), kChunkBytesMax);
    KVT_ASSIGN_OR_RETURN(DeviceBuffer buffer, device_.Allocate(std::max<size_t>(size, wanted)));
    chunk_ = std::make_shared<DeviceBuffer>(std::move(buffer));
    used_ = 0;
  }
  Piece piece{chunk_->as<uint8_t>() + used_, chunk_};
  used_ += size;
  return piece;
}

uint16_t RoundToBf16(float value) {
  if (std::isnan(value)) return 0x7fc0;
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float WeightReader::At(int out, int in) const {
  const size_t at = static_cast<size_t>(out) * in_ + static_cast<size_t>(in);
  if (part_.f32 != nullptr) return part_.f32[at];
  return std::bit_cast<float>(static_cast<uint32_t>(part_.bf16[at]) << 16);
}

uint16_t WeightReader::Bf16At(int out, int in) const {
  const size_t at = static_cast<size_t>(out) * in_ + static_cast<size_t>(in);
  return part_.f32 != nullptr ? RoundToBf16(part_.f32[at]) : part_.bf16[at];
}

}  // namespace kvt
