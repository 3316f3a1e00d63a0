#include "decode_worker/offload/offloaded_step.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/model/model_config.h"
#include "kernels/ops.h"
#include "kernels/select/attention_stats.h"

namespace kvt {
namespace {

// Blocks of one MakeDigest operation: their pairs fit an inline write.
constexpr size_t kDigestBlocksMax = Stream::kInlineWriteBytesMax / sizeof(SlotPair);

}  // namespace

absl::StatusOr<std::unique_ptr<OffloadedStep>> OffloadedStep::Create(
    const Transformer& transformer, KvCache& cache, const DigestHeads& heads,
    const OffloadBudget& budget, Stream& stream, TaskQueue& queue, int rows, Hooks hooks) {
  KVT_CHECK(heads.layers() == transformer.geometry().layers, "layers=", heads.layers());
  std::unique_ptr<OffloadedStep> step(
      new OffloadedStep(transformer, cache, heads, budget, stream, queue, std::move(hooks)));
  KVT_RETURN_IF_ERROR(step->Allocate(rows));
  return step;
}

absl::Status OffloadedStep::Allocate(int rows) {
  Device& device = transformer_.device();
  blocks_ = static_cast<size_t>(cache_.options().blocks_per_row);
  KVT_ASSIGN_OR_RETURN(state_, transformer_.NewStepState(
                                   {.rows = rows, .logits_rows = rows, .segments = rows}));
  KVT_ASSIGN_OR_RETURN(mailbox_, device.NewMailbox(1, StepResultBytes(rows)));
  const size_t entries = static_cast<size_t>(rows) * blocks_;
  KVT_ASSIGN_OR_RETURN(tables_, device.Allocate(entries * sizeof(SlotPair)));
  KVT_ASSIGN_OR_RETURN(scores_, device.Allocate(entries * sizeof(float)));
  KVT_ASSIGN_OR_RETURN(selected_, device.Allocate(entries * sizeof(int32_t)));
  const int queries = std::max(1, heads_.heads_max()) * transformer_.config().GroupSize();
  const int blocks = static_cast<int>(blocks_);
  KVT_ASSIGN_OR_RETURN(
      workspace_, device.Allocate(std::max(device.ops().ScoreWorkspaceBytes(queries, 1, blocks),
                                           device.ops().SelectWorkspaceBytes(rows, blocks))));
  KVT_ASSIGN_OR_RETURN(digest_work_, device.Allocate(kDigestBlocksMax *
                                                     (sizeof(SlotPair) + sizeof(uint32_t))));
  host_scores_.resize(entries);
  host_selected_.resize(entries);
  layers_.resize(static_cast<size_t>(heads_.layers()));
  return absl::OkStatus();
}

void OffloadedStep::SetBlock(int table_row, const OffloadedSlots& slots, int block) {
  for (int layer = 0; layer < heads_.layers(); ++layer) {
    const SlotPair pair = slots.Pair(layer, block);
    if (pair.base != kSlotNone) cache_.SetTable(*stream_, table_row, layer, block, {&pair, 1});
  }
}

void OffloadedStep::MakeDigests(const DigestBuffer& digests, int layer,
                                absl::Span<const SlotPair> pairs, absl::Span<const uint32_t> blocks) {
  KVT_CHECK(!heads_.dense(layer) && pairs.size() == blocks.size(), "layer=", layer);
  auto* device_pairs = digest_work_.as<SlotPair>();
  auto* device_entries = reinterpret_cast<uint32_t*>(device_pairs + kDigestBlocksMax);
  for (size_t at = 0; at < pairs.size(); at += kDigestBlocksMax) {
    const absl::Span<const SlotPair> part = pairs.subspan(at, kDigestBlocksMax);
    stream_->WriteToDevice(device_pairs, part.data(), part.size() * sizeof(SlotPair));
    stream_->WriteToDevice(device_entries, blocks.data() + at, part.size() * sizeof(uint32_t));
    MakeDigestArgs args;
    args.geometry = cache_.geometry();
    args.spec = heads_.Spec(layer);
    args.slots = cache_.slots();
    args.blocks = device_pairs;
    args.entries = device_entries;
    args.count = static_cast<int>(part.size());
    args.digests = digests.Layer(layer);
    transformer_.device().ops().MakeDigest(*stream_, args);
  }
}

void OffloadedStep::Then(std::function<void()> then) {
  stream_->Callback([this, then = std::move(then)] { queue_.Post(then); });
}

int OffloadedStep::SelectedCount(const OffloadedRow& row, int layer) {
  return SelectedBlocks(row.slots->shape().budgets[static_cast<size_t>(layer)], row.position);
}

void OffloadedStep::Enqueue(uint64_t step, absl::Span<const OffloadedRow> rows) {
  KVT_CHECK(!busy_ && !rows.empty(), "step=", step);
  busy_ = true;
  step_ = step;
  rows_.assign(rows.begin(), rows.end());
  results_.assign(rows.size(), {});
  chosen_.resize(rows.size());
  std::vector<StepSegment> segments;
  for (const OffloadedRow& row : rows_) {
    segments.push_back({.table_row = row.table_row,
                        .first_position = row.position,
                        .tokens = absl::MakeConstSpan(&row.token, 1),
                        .logits_rows = 1});
  }
  transformer_.Begin(*stream_, *state_, cache_, segments);
  RunFrom(0);
}

void OffloadedStep::RunFrom(int layer) {
  for (; layer < heads_.layers(); ++layer) {
    transformer_.ProjectQkv(*stream_, *state_, layer);
    if (heads_.dense(layer)) {
      transformer_.Attend(*stream_, *state_, layer);
      transformer_.FinishLayer(*stream_, *state_, layer);
      continue;
    }
    if (Score(layer) || Plan(layer)) return;
    Attend(layer);
  }
  std::vector<SampleParams> samples;
  for (const OffloadedRow& row : rows_) samples.push_back(row.sample);
  transformer_.Logits(*stream_, *state_);
  transformer_.Sample(*stream_, *state_, samples, *mailbox_, 0, step_);
  Then([this] { Done(); });
}

bool OffloadedStep::Score(int layer) {
  LayerWork& work = layers_[static_cast<size_t>(layer)];
  work.score.clear();
  work.select.clear();
  std::vector<size_t> scored;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const MiddleBlocks middle = MiddleOf(rows_[r].position);
    const int count = SelectedCount(rows_[r], layer);
    if (count == 0 || count == middle.count()) continue;  // nothing to choose
    scored.push_back(r);
    float* scores = scores_.as<float>() + r * blocks_;
    work.score.push_back({nullptr, static_cast<uint32_t>(middle.first), middle.count(),
                          static_cast<int>(r), scores});
    work.select.push_back({scores, middle.count(), count, selected_.as<int32_t>() + r * blocks_});
  }
  if (scored.empty()) return false;
  Ops& ops = transformer_.device().ops();
  const LayerActivations activations = transformer_.Activations(*state_);
  ScoreBlocksArgs args;
  args.geometry = cache_.geometry();
  args.spec = heads_.Spec(layer);
  args.query_heads = transformer_.config().heads;
  args.scale = 1.0f / std::sqrt(static_cast<float>(args.geometry.head_dim));
  args.q = activations.qkv;
  args.q_stride = activations.qkv_stride;
  for (size_t i = 0; i < scored.size(); ++i) {
    args.digests = rows_[scored[i]].digests->Layer(layer);
    args.segments = {&work.score[i], 1};
    ops.ScoreBlocks(*stream_, args, workspace_.data(), workspace_.bytes());
  }
  ops.SelectTopBlocks(*stream_, {work.select, static_cast<int>(blocks_)}, workspace_.data(),
                      workspace_.bytes());
  for (size_t i = 0; i < scored.size(); ++i) {
    const size_t at = scored[i] * blocks_;
    stream_->CopyToHost(host_scores_.data() + at, work.select[i].scores,
                        static_cast<size_t>(work.select[i].blocks) * sizeof(float));
    stream_->CopyToHost(host_selected_.data() + at, work.select[i].selected,
                        static_cast<size_t>(work.select[i].count) * sizeof(int32_t));
  }
  Then([this, layer] {
    if (Plan(layer)) return;
    Attend(layer);
    RunFrom(layer + 1);
  });
  return true;
}

bool OffloadedStep::Plan(int layer) {
  fetches_.clear();
  for (size_t r = 0; r < rows_.size(); ++r) {
    const OffloadedRow& row = rows_[r];
    const MiddleBlocks middle = MiddleOf(row.position);
    const int count = SelectedCount(row, layer);
    std::vector<int32_t> blocks(static_cast<size_t>(count));
    std::vector<float> scores;
    if (count == middle.count()) {
      std::iota(blocks.begin(), blocks.end(), middle.first);
    } else {
      for (size_t i = 0; i < blocks.size(); ++i) {
        const int32_t at = host_selected_[r * blocks_ + i];
        blocks[i] = middle.first + at;
        scores.push_back(host_scores_[r * blocks_ + static_cast<size_t>(at)]);
      }
    }
    LayerSelection selection = row.slots->Select(
        layer, blocks, scores, FetchesMax(budget_, row.position / kBlockTokens + 1));
    OffloadedRowResult& result = results_[r];
    result.selected += count;
    result.misses += static_cast<int>(selection.fetches.size());
    result.left_out += selection.left_out;
    if (budget_.attend_resident) {
      selection.blocks = row.slots->WithResident(layer, std::move(selection.blocks), middle.first,
                                                 middle.end);
    }
    if (static_cast<int>(selection.blocks.size()) < middle.count()) result.exact = false;
    for (const BlockFetch& fetch : selection.fetches) {
      fetches_.push_back({static_cast<int>(r), fetch});
    }
    chosen_[r] = std::move(selection.blocks);
  }
  if (fetches_.empty()) return false;
  hooks_.fetch(layer, fetches_, [this, layer](const std::vector<bool>& ok) { OnFetched(layer, ok); });
  return true;
}

void OffloadedStep::OnFetched(int layer, const std::vector<bool>& ok) {
  KVT_CHECK(ok.size() == fetches_.size(), "fetches=", ok.size());
  for (size_t i = 0; i < ok.size(); ++i) {
    if (ok[i]) continue;
    const auto r = static_cast<size_t>(fetches_[i].row);
    const int32_t block = fetches_[i].fetch.block;
    rows_[r].slots->Forget(layer, block);
    chosen_[r].erase(std::find(chosen_[r].begin(), chosen_[r].end(), block));
    ++results_[r].lost;
    results_[r].exact = false;
  }
  Attend(layer);
  RunFrom(layer + 1);
}

void OffloadedStep::Attend(int layer) {
  LayerWork& work = layers_[static_cast<size_t>(layer)];
  work.tables.resize(rows_.size());
  work.attention.clear();
  for (size_t r = 0; r < rows_.size(); ++r) {
    const int position = rows_[r].position;
    work.tables[r] = rows_[r].slots->Table(layer, position, chosen_[r]);
    const std::vector<SlotPair>& table = work.tables[r];
    for (const SlotPair& pair : table) KVT_CHECK(pair.base != kSlotNone, "layer=", layer, " row=", r);
    SlotPair* device_table = tables_.as<SlotPair>() + r * blocks_;
    stream_->CopyToDevice(device_table, table.data(), table.size() * sizeof(SlotPair));
    work.attention.push_back({device_table,
                              (static_cast<int>(table.size()) - 1) * kBlockTokens +
                                  position % kBlockTokens,
                              static_cast<int>(r), 1});
  }
  transformer_.AttendOver(*stream_, *state_, work.attention);
  transformer_.FinishLayer(*stream_, *state_, layer);
}

void OffloadedStep::Done() {
  KVT_CHECK(mailbox_->Tag(0) == step_, "tag=", mailbox_->Tag(0), " step=", step_);
  const auto* payload = static_cast<const StepResult*>(mailbox_->HostPayload(0));
  KVT_CHECK(payload->logits_rows == rows_.size());
  OffloadedStepResult result;
  result.step = step_;
  result.saturated = payload->kv_saturated;
  result.rows = std::move(results_);
  for (size_t r = 0; r < rows_.size(); ++r) result.rows[r].token = payload->tokens[r];
  busy_ = false;
  rows_.clear();
  hooks_.step_done(result);
}

}  // namespace kvt
