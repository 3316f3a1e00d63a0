#include "kernels/model/digest_heads.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"

namespace kvt {
namespace {

constexpr absl::Duration kUploadTimeout = absl::Seconds(60);

}  // namespace

absl::StatusOr<std::unique_ptr<DigestHeads>> DigestHeads::Create(Device& device,
                                                                 const Calibration& calibration) {
  std::unique_ptr<DigestHeads> out(new DigestHeads());
  out->bits_ = calibration.bits;
  const auto dim = static_cast<size_t>(calibration.geometry.head_dim);
  size_t count = 0;
  for (const CalibrationLayer& layer : calibration.layers) count += layer.heads.size();
  KVT_ASSIGN_OR_RETURN(out->channels_,
                       device.Allocate(std::max<size_t>(count, 1) * 2 * dim * sizeof(float)));
  const std::unique_ptr<Stream> stream = device.NewStream(StreamPriority::kNormal);
  float* next = out->channels_.as<float>();
  for (const CalibrationLayer& layer : calibration.layers) {
    std::vector<DigestHead>& heads = out->heads_.emplace_back();
    for (const CalibrationHead& head : layer.heads) {
      KVT_CHECK(head.offset.size() == dim && head.scale.size() == dim);
      stream->WriteToDevice(next, head.offset.data(), dim * sizeof(float));
      stream->WriteToDevice(next + dim, head.scale.data(), dim * sizeof(float));
      heads.push_back({head.kv_head, next, next + dim});
      next += 2 * dim;
    }
    out->heads_max_ = std::max(out->heads_max_, static_cast<int>(heads.size()));
  }
  const std::unique_ptr<Event> written = device.NewEvent();
  stream->Record(*written);
  if (!written->HostWait(kUploadTimeout)) {
    return absl::DeadlineExceededError("the device did not take the calibration");
  }
  KVT_RETURN_IF_ERROR(device.Health());
  return out;
}

}  // namespace kvt
