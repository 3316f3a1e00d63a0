#include "kernels/model/text_run.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/model/model_config.h"
#include "kernels/select/attention_stats.h"

namespace kvt {
namespace {

constexpr absl::Duration kStepDeadline = absl::Seconds(300);

}  // namespace

absl::StatusOr<std::unique_ptr<TextRun>> TextRun::Create(const Transformer& transformer,
                                                         int tokens_max) {
  const ModelConfig& config = transformer.config();
  Device& device = transformer.device();
  if (tokens_max < 1 || tokens_max > config.context_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("tokens: ", tokens_max, " is not in [1, ",
                                                   config.context_tokens,
                                                   "], the model's context"));
  }
  KVT_CHECK(device.HostAddressable());
  auto run = std::unique_ptr<TextRun>(new TextRun(transformer));
  run->stream_ = device.NewStream(StreamPriority::kNormal);
  run->event_ = device.NewEvent();
  KVT_ASSIGN_OR_RETURN(run->state_, transformer.NewStepState({.rows = kPrefillChunkTokensMax,
                                                              .logits_rows = kSparseRowsMax,
                                                              .segments = kSparseRowsMax}));
  const Geometry& geometry = transformer.geometry();
  const int blocks = static_cast<int>(CeilDiv(static_cast<uint64_t>(tokens_max), kBlockTokens));
  const uint32_t slots = 2u * static_cast<uint32_t>(geometry.layers * blocks);
  KVT_ASSIGN_OR_RETURN(run->cache_, KvCache::Create(device, geometry,
                                                    {.slot_count = slots, .table_rows = 1,
                                                     .blocks_per_row = blocks}));
  std::vector<SlotPair> pairs(slots / 2);
  for (uint32_t i = 0; i < slots / 2; ++i) pairs[i] = {2 * i, 2 * i + 1};
  run->cache_->SetTableAllLayers(*run->stream_, 0, 0, blocks, pairs);
  run->host_tables_.resize(static_cast<size_t>(kSparseRowsMax) * static_cast<size_t>(blocks));
  KVT_ASSIGN_OR_RETURN(run->tables_, device.Allocate(run->host_tables_.size() * sizeof(SlotPair)));
  run->segments_.reserve(kSparseRowsMax);
  return run;
}

absl::Status TextRun::Wait() {
  stream_->Record(*event_);
  if (event_->HostWait(kStepDeadline)) return transformer_.device().Health();
  return absl::DeadlineExceededError(
      absl::StrCat("a layer took longer than ", absl::FormatDuration(kStepDeadline)));
}

absl::Status TextRun::Prefill(absl::Span<const int32_t> tokens, int first_position,
                              const Observer& observer) {
  for (size_t at = 0; at < tokens.size(); at += kPrefillChunkTokensMax) {
    const int position = first_position + static_cast<int>(at);
    const StepSegment segment{0, position, tokens.subspan(at, kPrefillChunkTokensMax), 0};
    transformer_.Begin(*stream_, *state_, *cache_, {&segment, 1});
    for (int layer = 0; layer < transformer_.geometry().layers; ++layer) {
      transformer_.ProjectQkv(*stream_, *state_, layer);
      if (observer != nullptr) {
        KVT_RETURN_IF_ERROR(Wait());
        observer(layer, position, transformer_.Activations(*state_));
      }
      transformer_.Attend(*stream_, *state_, layer);
      transformer_.FinishLayer(*stream_, *state_, layer);
    }
    KVT_RETURN_IF_ERROR(Wait());
  }
  return absl::OkStatus();
}

void TextRun::AttendLists(int layer, int first_position, int rows, const RowSelections& selections,
                          int stride, int offset) {
  const size_t blocks = static_cast<size_t>(cache_->options().blocks_per_row);
  const SlotPair* full = Table(layer);
  segments_.clear();
  for (int r = 0; r < rows; ++r) {
    const int position = first_position + r;
    const MiddleBlocks middle = MiddleOf(position);
    SlotPair* table = host_tables_.data() + static_cast<size_t>(r) * blocks;
    int used = 0;
    for (int b = 0; b < middle.first && b <= position / kBlockTokens; ++b) table[used++] = full[b];
    int last = -1;
    for (const int32_t b : selections.blocks[static_cast<size_t>(r * stride + offset)]) {
      KVT_CHECK(b >= middle.first && b < middle.end && b > last, "block=", b);
      last = b;
      table[used++] = full[b];
    }
    for (int b = middle.end; b <= position / kBlockTokens; ++b) table[used++] = full[b];
    segments_.push_back({tables_.as<SlotPair>() + static_cast<size_t>(r) * blocks,
                         (used - 1) * kBlockTokens + position % kBlockTokens, r, 1});
  }
  stream_->CopyToDevice(tables_.data(), host_tables_.data(),
                        static_cast<size_t>(rows) * blocks * sizeof(SlotPair));
  transformer_.AttendOver(*stream_, *state_, segments_);
}

absl::Status TextRun::AttendByHead(int layer, int first_position, const RowSelections& selections) {
  const LayerActivations a = transformer_.Activations(*state_);
  const int heads = transformer_.geometry().kv_heads;
  // Each pass computes every head over one head's blocks; what that head's group attended is kept.
  std::vector<uint8_t> kept(static_cast<size_t>(a.rows) * a.attended_row_bytes);
  uint8_t* attended = static_cast<uint8_t*>(a.attended);
  const size_t group_bytes = a.attended_row_bytes / static_cast<size_t>(heads);
  for (int head = 0; head < heads; ++head) {
    AttendLists(layer, first_position, a.rows, selections, heads, head);
    KVT_RETURN_IF_ERROR(Wait());
    for (int r = 0; r < a.rows; ++r) {
      const size_t at = static_cast<size_t>(r) * a.attended_row_bytes +
                        static_cast<size_t>(head) * group_bytes;
      std::memcpy(kept.data() + at, attended + at, group_bytes);
    }
  }
  std::memcpy(attended, kept.data(), kept.size());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> TextRun::Decode(absl::Span<const int32_t> tokens,
                                                   int first_position, const Selector& selector) {
  const int rows = static_cast<int>(tokens.size());
  KVT_CHECK(rows > 0 && rows <= kSparseRowsMax, "rows=", rows);
  const StepSegment segment{0, first_position, tokens, rows};
  transformer_.Begin(*stream_, *state_, *cache_, {&segment, 1});
  for (int layer = 0; layer < transformer_.geometry().layers; ++layer) {
    transformer_.ProjectQkv(*stream_, *state_, layer);
    KVT_RETURN_IF_ERROR(Wait());
    const RowSelections selections =
        selector(layer, first_position, transformer_.Activations(*state_));
    if (selections.full) {
      transformer_.Attend(*stream_, *state_, layer);
    } else if (selections.by_head) {
      KVT_RETURN_IF_ERROR(AttendByHead(layer, first_position, selections));
    } else {
      KVT_CHECK(static_cast<int>(selections.blocks.size()) == rows);
      AttendLists(layer, first_position, rows, selections, 1, 0);
    }
    transformer_.FinishLayer(*stream_, *state_, layer);
    KVT_RETURN_IF_ERROR(Wait());
  }
  std::vector<float> logits(static_cast<size_t>(rows) *
                            static_cast<size_t>(transformer_.config().vocab));
  transformer_.Logits(*stream_, *state_);
  transformer_.ReadLogits(*stream_, *state_, logits.data());
  KVT_RETURN_IF_ERROR(Wait());
  return logits;
}

}  // namespace kvt
