#include "decode_worker/offload/selecting_heads.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/units.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<SelectingHeads>> SelectingHeads::Create(Device& device,
                                                                       Calibration calibration) {
  std::unique_ptr<SelectingHeads> selecting(new SelectingHeads(std::move(calibration)));
  const Calibration& source = selecting->calibration_;
  const auto dim = static_cast<size_t>(source.geometry.head_dim);
  std::vector<float> channels;  // offsets, then scales, of every head
  for (const CalibrationLayer& layer : source.layers) {
    for (const CalibrationHead& head : layer.heads) {
      KVT_CHECK(head.offset.size() == dim && head.scale.size() == dim);
      channels.insert(channels.end(), head.offset.begin(), head.offset.end());
      channels.insert(channels.end(), head.scale.begin(), head.scale.end());
    }
  }
  const size_t bytes = channels.size() * sizeof(float);
  KVT_ASSIGN_OR_RETURN(selecting->channels_, device.Allocate(std::max<size_t>(bytes, 64)));
  const std::unique_ptr<Stream> stream = device.NewStream(StreamPriority::kNormal);
  if (bytes > 0) stream->CopyToDevice(selecting->channels_.data(), channels.data(), bytes);
  const float* next = selecting->channels_.as<float>();
  for (const CalibrationLayer& layer : source.layers) {
    std::vector<DigestHead>& heads = selecting->heads_.emplace_back();
    for (const CalibrationHead& head : layer.heads) {
      heads.push_back({head.kv_head, next, next + dim});
      next += 2 * dim;
    }
  }
  return selecting;  // behind the stream's end, which waits for the copy
}

int SelectingHeads::heads_max() const {
  size_t most = 0;
  for (const auto& heads : heads_) most = std::max(most, heads.size());
  return static_cast<int>(most);
}

absl::StatusOr<DigestBuffer> DigestBuffer::Create(Device& device, const SelectingHeads& heads,
                                                  int blocks) {
  DigestBuffer buffer;
  size_t bytes = 0;
  for (int layer = 0; layer < heads.layers(); ++layer) {
    buffer.offsets_.push_back(bytes);
    bytes += RoundUp(size_t{heads.DigestBytes(layer)} * static_cast<size_t>(blocks), size_t{64});
  }
  KVT_ASSIGN_OR_RETURN(buffer.memory_, device.Allocate(std::max<size_t>(bytes, 64)));
  return buffer;
}

}  // namespace kvt
