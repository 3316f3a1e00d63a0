#include "kernels/model/digest_selector.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/model/model_config.h"
#include "kernels/ops.h"
#include "kernels/select/attention_stats.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<DigestSelector>> DigestSelector::Create(
    TextRun& run, int bits, std::vector<std::vector<CalibrationHead>> layers) {
  const Transformer& transformer = run.transformer();
  Device& device = transformer.device();
  Calibration calibration;
  calibration.geometry = transformer.geometry();
  calibration.bits = bits;
  KVT_CHECK(static_cast<int>(layers.size()) == calibration.geometry.layers, "layers=", layers.size());
  for (std::vector<CalibrationHead>& heads : layers) {
    calibration.layers.emplace_back().heads = std::move(heads);
  }
  auto selector = std::unique_ptr<DigestSelector>(new DigestSelector(run));
  KVT_ASSIGN_OR_RETURN(selector->heads_, DigestHeads::Create(device, calibration));
  selector->blocks_ = run.cache().options().blocks_per_row;
  const auto blocks = static_cast<size_t>(selector->blocks_);
  for (const uint32_t bytes : calibration.DigestBytesByLayer()) {
    KVT_ASSIGN_OR_RETURN(DeviceBuffer digests, device.Allocate(std::max<size_t>(blocks * bytes, 64)));
    selector->digests_.push_back(std::move(digests));
  }
  const size_t rows = kSparseRowsMax;
  KVT_ASSIGN_OR_RETURN(selector->scores_, device.Allocate(rows * blocks * sizeof(float)));
  KVT_ASSIGN_OR_RETURN(selector->selected_, device.Allocate(rows * blocks * sizeof(int32_t)));
  const int queries = std::max(1, selector->heads_->heads_max()) * transformer.config().GroupSize();
  const size_t workspace = std::max(
      device.ops().ScoreWorkspaceBytes(queries, kSparseRowsMax, selector->blocks_),
      device.ops().SelectWorkspaceBytes(kSparseRowsMax, selector->blocks_));
  KVT_ASSIGN_OR_RETURN(selector->workspace_, device.Allocate(workspace));
  selector->score_segments_.reserve(rows);
  selector->select_segments_.reserve(rows);
  return selector;
}

absl::Status DigestSelector::MakeDigests(int layer, int first, int end) {
  if (first >= end || dense(layer)) return absl::OkStatus();
  MakeDigestArgs args;
  args.geometry = run_.cache().geometry();
  args.spec = heads_->Spec(layer);
  args.slots = run_.cache().slots();
  args.blocks = run_.Table(layer) + first;
  args.count = end - first;
  args.digests = digests_[static_cast<size_t>(layer)].as<uint8_t>() +
                 static_cast<size_t>(first) * args.spec.Bytes(args.geometry.head_dim);
  run_.transformer().device().ops().MakeDigest(run_.stream(), args);
  return run_.Wait();
}

std::vector<absl::Span<const float>> DigestSelector::EnqueueScore(int layer,
                                                                  absl::Span<const int> positions,
                                                                  const float* q, int q_stride) {
  KVT_CHECK(!dense(layer) && positions.size() <= static_cast<size_t>(kSparseRowsMax));
  score_segments_.clear();
  std::vector<absl::Span<const float>> scores;
  for (size_t r = 0; r < positions.size(); ++r) {
    const MiddleBlocks middle = MiddleOf(positions[r]);
    float* row = scores_.as<float>() + r * static_cast<size_t>(blocks_);
    score_segments_.push_back({nullptr, static_cast<uint32_t>(middle.first), middle.count(),
                               static_cast<int>(r), row});
    scores.emplace_back(row, static_cast<size_t>(middle.count()));
  }
  ScoreBlocksArgs args;
  args.geometry = run_.cache().geometry();
  args.spec = heads_->Spec(layer);
  args.query_heads = run_.transformer().config().heads;
  args.scale = 1.0f / std::sqrt(static_cast<float>(args.geometry.head_dim));
  args.q = q;
  args.q_stride = q_stride;
  args.digests = digests_[static_cast<size_t>(layer)].as<uint8_t>();
  args.segments = score_segments_;
  run_.transformer().device().ops().ScoreBlocks(run_.stream(), args, workspace_.data(),
                                                workspace_.bytes());
  return scores;
}

absl::StatusOr<std::vector<absl::Span<const float>>> DigestSelector::Score(
    int layer, absl::Span<const int> positions, const float* q, int q_stride) {
  std::vector<absl::Span<const float>> scores = EnqueueScore(layer, positions, q, q_stride);
  KVT_RETURN_IF_ERROR(run_.Wait());
  return scores;
}

absl::StatusOr<std::vector<std::vector<int32_t>>> DigestSelector::Select(
    int layer, absl::Span<const int> positions, const float* q, int q_stride, int budget_tokens) {
  const std::vector<absl::Span<const float>> scores =
      EnqueueScore(layer, positions, q, q_stride);
  select_segments_.clear();
  for (size_t r = 0; r < positions.size(); ++r) {
    select_segments_.push_back({scores[r].data(), static_cast<int>(scores[r].size()),
                                SelectedBlocks(budget_tokens, positions[r]),
                                selected_.as<int32_t>() + r * static_cast<size_t>(blocks_)});
  }
  run_.transformer().device().ops().SelectTopBlocks(
      run_.stream(), {select_segments_, blocks_}, workspace_.data(), workspace_.bytes());
  KVT_RETURN_IF_ERROR(run_.Wait());
  std::vector<std::vector<int32_t>> selected;
  for (size_t r = 0; r < positions.size(); ++r) {
    const SelectSegment& segment = select_segments_[r];
    std::vector<int32_t>& row = selected.emplace_back(
        segment.selected, segment.selected + std::min(segment.count, segment.blocks));
    for (int32_t& block : row) block += MiddleOf(positions[r]).first;
  }
  return selected;
}

}  // namespace kvt
