#include "decode_worker/offload/digest_stage.h"

#include <cstring>

namespace kvt {

absl::StatusOr<DigestStage> DigestStage::Create(Device& device, const DigestLayout& layout,
                                                int blocks) {
  KVT_CHECK(device.HostAddressable());
  DigestStage stage(layout);
  KVT_ASSIGN_OR_RETURN(stage.memory_,
                       device.Allocate(size_t{layout.BlockBytes()} * static_cast<size_t>(blocks)));
  return stage;
}

std::byte* DigestStage::Base(int index) const {
  return memory_.as<std::byte>() + size_t{layout_->BlockBytes()} * static_cast<size_t>(index);
}

std::byte* DigestStage::Residual(int index) const { return Base(index) + layout_->BlockBytes() / 2; }

void DigestStage::CopyTo(const DigestBuffer& digests, int index, int block) const {
  for (int layer = 0; layer < layout_->layers(); ++layer) {
    const size_t bytes = layout_->LayerBytes(layer);
    if (bytes == 0) continue;
    std::memcpy(digests.Layer(layer) + bytes * static_cast<size_t>(block),
                Base(index) + layout_->LayerOffset(layer), bytes);
  }
}

void DigestStage::CopyFrom(const DigestBuffer& digests, int block, int index) const {
  for (int layer = 0; layer < layout_->layers(); ++layer) {  // the padding is zero
    const size_t bytes = layout_->LayerBytes(layer);
    if (bytes == 0) continue;
    std::memcpy(Base(index) + layout_->LayerOffset(layer),
                digests.Layer(layer) + bytes * static_cast<size_t>(block), bytes);
  }
}

}  // namespace kvt
