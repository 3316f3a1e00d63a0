#include "kernels/model/step_buffers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<StepBuffers>> StepBuffers::Create(Device& device,
                                                                 const StepLimits& limits,
                                                                 const StepSizes& sizes,
                                                                 int layers) {
  if (limits.rows <= 0 || limits.logits_rows <= 0 || limits.segments <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("step limits: rows ", limits.rows,
                                                   ", logits_rows ", limits.logits_rows,
                                                   ", segments ", limits.segments));
  }
  auto state = std::unique_ptr<StepBuffers>(new StepBuffers(limits, sizes, layers));
  KVT_ASSIGN_OR_RETURN(state->memory_, device.Allocate(state->Cut(nullptr)));
  state->Cut(state->memory_.as<uint8_t>());
  return state;
}

StepBuffers::StepBuffers(const StepLimits& limits, const StepSizes& sizes, int layers)
    : limits_(limits), sizes_(sizes), layers_(layers) {
  const size_t rows = static_cast<size_t>(limits.rows);
  segments_.reserve(static_cast<size_t>(limits.segments) * static_cast<size_t>(layers));
  host_tokens_.reserve(rows);
  host_positions_.reserve(rows);
  host_logits_index_.reserve(static_cast<size_t>(limits.logits_rows));
}

size_t StepBuffers::Cut(uint8_t* base) {
  size_t used = 0;
  const auto take = [&](size_t bytes) -> void* {
    uint8_t* at = base == nullptr ? nullptr : base + used;
    used += RoundUp(bytes, 64);
    return at;
  };
  const size_t rows = static_cast<size_t>(limits_.rows);
  const size_t logits_rows = static_cast<size_t>(limits_.logits_rows);
  const auto width = [](int n) { return static_cast<size_t>(n); };
  tokens_ = static_cast<int32_t*>(take(rows * 4));
  positions_ = static_cast<int32_t*>(take(rows * 4));
  logits_index_ = static_cast<int32_t*>(take(logits_rows * 4));
  residual_ = static_cast<float*>(take(rows * width(sizes_.hidden) * 4));
  normed_ = take(std::max(rows, logits_rows) * width(sizes_.hidden) * sizes_.act_bytes);
  qkv_ = static_cast<float*>(take(rows * width(sizes_.qkv_width) * 4));
  attended_ = take(rows * width(sizes_.query_width) * sizes_.act_bytes);
  gated_ = take(rows * width(sizes_.intermediate) * sizes_.act_bytes);
  logits_ = static_cast<float*>(take(logits_rows * width(sizes_.vocab) * 4));
  sample_params_ = static_cast<SampleParams*>(take(logits_rows * sizeof(SampleParams)));
  stats_ = static_cast<KvWriteStats*>(take(sizeof(KvWriteStats)));
  workspace_ = take(sizes_.workspace_bytes);
  return used;
}

void StepBuffers::Write(Stream& stream, int32_t* dst, const std::vector<int32_t>& values) {
  constexpr size_t kPiece = Stream::kInlineWriteBytesMax / sizeof(int32_t);
  for (size_t at = 0; at < values.size(); at += kPiece) {
    stream.WriteToDevice(dst + at, values.data() + at,
                         std::min(kPiece, values.size() - at) * sizeof(int32_t));
  }
}

void StepBuffers::TakeSegments(Stream& stream, KvCache& cache,
                               absl::Span<const StepSegment> segments, int vocab,
                               int context_tokens) {
  KVT_CHECK(!segments.empty() && static_cast<int>(segments.size()) <= limits_.segments,
            "segments=", segments.size());
  cache_ = &cache;
  host_tokens_.clear();
  host_positions_.clear();
  host_logits_index_.clear();
  segments_.clear();
  for (const StepSegment& segment : segments) {
    const int count = static_cast<int>(segment.tokens.size());
    KVT_CHECK(count > 0 && segment.first_position >= 0 &&
                  segment.first_position + count <= context_tokens,
              "first_position=", segment.first_position, " tokens=", count);
    KVT_CHECK(segment.first_position + count <= cache.options().blocks_per_row * kBlockTokens,
              "first_position=", segment.first_position, " tokens=", count);
    KVT_CHECK(segment.logits_rows >= 0 && segment.logits_rows <= count,
              "logits_rows=", segment.logits_rows);
    for (int i = 0; i < count; ++i) {
      const int32_t token = segment.tokens[static_cast<size_t>(i)];
      KVT_CHECK(token >= 0 && token < vocab, "token=", token);
      if (i >= count - segment.logits_rows) {
        host_logits_index_.push_back(static_cast<int32_t>(host_tokens_.size()));
      }
      host_tokens_.push_back(token);
      host_positions_.push_back(segment.first_position + i);
    }
  }
  rows_ = static_cast<int>(host_tokens_.size());
  logits_rows_ = static_cast<int>(host_logits_index_.size());
  KVT_CHECK(rows_ <= limits_.rows && logits_rows_ <= limits_.logits_rows, "rows=", rows_,
            " logits_rows=", logits_rows_);
  segment_count_ = segments.size();
  for (int layer = 0; layer < layers_; ++layer) {
    int first_row = 0;
    for (const StepSegment& segment : segments) {
      const int count = static_cast<int>(segment.tokens.size());
      segments_.push_back(
          {cache.Table(segment.table_row, layer), segment.first_position, first_row, count});
      first_row += count;
    }
  }
  Write(stream, tokens_, host_tokens_);
  Write(stream, positions_, host_positions_);
  Write(stream, logits_index_, host_logits_index_);
  const KvWriteStats zero;
  stream.WriteToDevice(stats_, &zero, sizeof(zero));
}

absl::Span<const AttentionSegment> StepBuffers::Segments(int layer) const {
  return absl::MakeConstSpan(segments_).subspan(static_cast<size_t>(layer) * segment_count_,
                                                segment_count_);
}

}  // namespace kvt
