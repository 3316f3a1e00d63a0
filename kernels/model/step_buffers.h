// StepState as the transformer sees it: the activations of one step and the description of its rows
// on the device. One allocation, cut at creation; nothing is allocated in a step.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"
#include "kernels/ops.h"
#include "kernels/paged_kv.h"

namespace kvt {

struct StepSizes {
  int hidden = 0;
  int qkv_width = 0;
  int query_width = 0;
  int intermediate = 0;
  int vocab = 0;
  size_t act_bytes = 0;
  size_t workspace_bytes = 0;  // the largest any operation needs
  size_t attention_bytes = 0;  // of it, for attention
};

class StepBuffers final : public StepState {
 public:
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<StepBuffers>> Create(
      Device& device, const StepLimits& limits, const StepSizes& sizes, int layers);

  [[nodiscard]] const StepLimits& limits() const override { return limits_; }

  // Checks the segments against the limits, keeps what describes them, and enqueues their tokens,
  // positions and logits rows to the device. Also clears the write statistics.
  void TakeSegments(Stream& stream, KvCache& cache, absl::Span<const StepSegment> segments,
                    int vocab, int context_tokens);

  [[nodiscard]] int rows() const { return rows_; }
  [[nodiscard]] int logits_rows() const { return logits_rows_; }
  [[nodiscard]] KvCache* cache() const { return cache_; }
  // Rows of the batch for one layer's attention; host memory, valid until the next TakeSegments.
  [[nodiscard]] absl::Span<const AttentionSegment> Segments(int layer) const;

  // Device memory. residual f32 [rows][hidden], normed act [rows][hidden], qkv f32, attended act
  // [rows][query_width], gated act [rows][intermediate], logits f32 [logits_rows][vocab].
  [[nodiscard]] int32_t* tokens() const { return tokens_; }
  [[nodiscard]] int32_t* positions() const { return positions_; }
  [[nodiscard]] int32_t* logits_index() const { return logits_index_; }
  [[nodiscard]] float* residual() const { return residual_; }
  [[nodiscard]] void* normed() const { return normed_; }
  [[nodiscard]] float* qkv() const { return qkv_; }
  [[nodiscard]] void* attended() const { return attended_; }
  [[nodiscard]] void* gated() const { return gated_; }
  [[nodiscard]] float* logits() const { return logits_; }
  [[nodiscard]] SampleParams* sample_params() const { return sample_params_; }
  [[nodiscard]] KvWriteStats* stats() const { return stats_; }
  [[nodiscard]] void* workspace() const { return workspace_; }
  [[nodiscard]] size_t attention_bytes() const { return sizes_.attention_bytes; }

 private:
  StepBuffers(const StepLimits& limits, const StepSizes& sizes, int layers);
  // Hands out the members' places; with a null base only counts. Returns the bytes in all.
  size_t Cut(uint8_t* base);
  // Inline writes hold 64 KiB each.
  static void Write(Stream& stream, int32_t* dst, const std::vector<int32_t>& values);

  const StepLimits limits_;
  const StepSizes sizes_;
  const int layers_;
  DeviceBuffer memory_;
  int32_t* tokens_ = nullptr;
  int32_t* positions_ = nullptr;
  int32_t* logits_index_ = nullptr;
  float* residual_ = nullptr;
  void* normed_ = nullptr;
  float* qkv_ = nullptr;
  void* attended_ = nullptr;
  void* gated_ = nullptr;
  float* logits_ = nullptr;
  SampleParams* sample_params_ = nullptr;
  KvWriteStats* stats_ = nullptr;
  void* workspace_ = nullptr;

  KvCache* cache_ = nullptr;
  int rows_ = 0;
  int logits_rows_ = 0;
  size_t segment_count_ = 0;
  std::vector<AttentionSegment> segments_;  // [layers][segment_count_]
  std::vector<int32_t> host_tokens_, host_positions_, host_logits_index_;
};

}  // namespace kvt
