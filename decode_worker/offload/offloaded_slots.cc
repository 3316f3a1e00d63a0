#include "decode_worker/offload/offloaded_slots.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "kernels/base/check.h"
#include "kernels/base/limits.h"

namespace kvt {
namespace {

// Hot slots that change layers at once.
int Probe(const OffloadedShape& shape) { return std::max(1, shape.selected_mean / 8); }

}  // namespace

std::optional<OffloadedSlots> OffloadedSlots::TryCreate(SlotPool& pool, OffloadedShape shape) {
  if (!pool.TryReserve(shape.Slots())) return std::nullopt;
  return OffloadedSlots(pool, std::move(shape));
}

OffloadedSlots::OffloadedSlots(SlotPool& pool, OffloadedShape shape)
    : pool_(&pool), shape_(std::move(shape)), layers_(shape_.dense.size()) {
  for (size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    layer.dense = shape_.dense[l];
    layer.hot = HotSet(shape_.hot_slots[l], Probe(shape_));
    for (int i = 0; i < shape_.hot_slots[l]; ++i) layer.all_hot.push_back(pool_->AllocatePair());
    layer.free_hot.assign(layer.all_hot.rbegin(), layer.all_hot.rend());
  }
}

OffloadedSlots::OffloadedSlots(OffloadedSlots&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      shape_(std::move(other.shape_)),
      layers_(std::move(other.layers_)),
      whole_(std::move(other.whole_)),
      whole_count_(other.whole_count_),
      steps_(other.steps_) {}

OffloadedSlots::~OffloadedSlots() { KVT_CHECK(pool_ == nullptr, "blocks=", whole_.size()); }

bool OffloadedSlots::AppendWhole() {
  KVT_CHECK(blocks() < shape_.blocks_max, "blocks=", blocks());
  if (whole_count_ >= shape_.whole_max && !pool_->TryReserve(2 * Selecting())) return false;
  ++whole_count_;
  whole_.push_back(true);
  for (Layer& layer : layers_) {
    if (layer.spare.empty()) {
      layer.pairs.push_back(pool_->AllocatePair());
    } else {
      layer.pairs.push_back(layer.spare.back());
      layer.spare.pop_back();
    }
  }
  return true;
}

void OffloadedSlots::AppendStored() {
  KVT_CHECK(blocks() < shape_.blocks_max, "blocks=", blocks());
  whole_.push_back(false);
  for (Layer& layer : layers_) {
    layer.pairs.push_back(layer.dense ? pool_->AllocatePair() : SlotPair());
  }
}

void OffloadedSlots::LetGo(int block, uint64_t after_step) {
  KVT_CHECK(whole(block), "block=", block);
  const bool keep = whole_count_ <= shape_.whole_max;
  for (Layer& layer : layers_) {
    if (layer.dense) continue;
    const SlotPair pair = std::exchange(layer.pairs[static_cast<size_t>(block)], SlotPair());
    if (keep) {
      layer.spare.push_back(pair);
    } else {
      pool_->ReleasePair(pair, after_step);
    }
  }
  whole_[static_cast<size_t>(block)] = false;
  --whole_count_;
}

LayerSelection OffloadedSlots::Select(int index, absl::Span<const int32_t> blocks,
                                      absl::Span<const float> scores, int fetches_max) {
  Layer& layer = layers_[static_cast<size_t>(index)];
  KVT_CHECK(!layer.dense && (scores.empty() || scores.size() == blocks.size()), "layer=", index);
  LayerSelection selection;
  std::vector<size_t> misses;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!whole(blocks[i]) && !layer.hot_pairs.contains(blocks[i])) misses.push_back(i);
  }
  absl::flat_hash_set<int32_t> without;
  if (static_cast<int>(misses.size()) > fetches_max) {
    std::stable_sort(misses.begin(), misses.end(), [&](size_t a, size_t b) {
      return !scores.empty() && scores[a] > scores[b];
    });
    for (size_t i = static_cast<size_t>(fetches_max); i < misses.size(); ++i) {
      without.insert(blocks[misses[i]]);
    }
    selection.left_out = static_cast<int>(without.size());
  }
  std::vector<int32_t> hot;
  for (const int32_t block : blocks) {
    if (without.contains(block)) continue;
    selection.blocks.push_back(block);
    if (!whole(block)) hot.push_back(block);
  }
  const HotSet::Change change = layer.hot.Use(hot);
  for (const int32_t block : change.evicted) {
    const auto it = layer.hot_pairs.find(block);
    layer.free_hot.push_back(it->second);
    layer.hot_pairs.erase(it);
  }
  for (const int32_t block : change.misses) {
    KVT_CHECK(!layer.free_hot.empty(), "layer=", index);
    const SlotPair pair = layer.free_hot.back();
    layer.free_hot.pop_back();
    layer.hot_pairs.emplace(block, pair);
    selection.fetches.push_back({block, pair});
  }
  return selection;
}

std::vector<int32_t> OffloadedSlots::WithResident(int index, std::vector<int32_t> blocks, int first,
                                                  int end) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  for (const int32_t block : layer.hot.Blocks()) blocks.push_back(block);
  for (int b = first; b < std::min(end, this->blocks()); ++b) {
    if (whole(b)) blocks.push_back(b);
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  return blocks;
}

void OffloadedSlots::EndStep() {
  if (++steps_ < kBalanceSteps) return;
  steps_ = 0;
  const int probe = Probe(shape_);
  Layer* from = nullptr;
  Layer* to = nullptr;
  for (size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    if (layer.dense) continue;
    const bool can_give = layer.hot.capacity() - probe >= shape_.selected[l];
    const bool can_take = layer.hot.capacity() + probe <= shape_.middle_max;
    if (can_give && (from == nullptr || layer.hot.Loss() < from->hot.Loss())) from = &layer;
    if (can_take && (to == nullptr || layer.hot.Gain() > to->hot.Gain())) to = &layer;
  }
  if (from != nullptr && to != nullptr && from != to && to->hot.Gain() > from->hot.Loss() + 1) {
    MoveHotSlots(*from, *to, probe);
  }
  for (Layer& layer : layers_) layer.hot.ResetProbe();
}

void OffloadedSlots::MoveHotSlots(Layer& from, Layer& to, int count) {
  for (const int32_t block : from.hot.SetCapacity(from.hot.capacity() - count)) {
    const auto it = from.hot_pairs.find(block);
    from.free_hot.push_back(it->second);
    from.hot_pairs.erase(it);
  }
  to.hot.SetCapacity(to.hot.capacity() + count);
  for (int i = 0; i < count; ++i) {
    const SlotPair pair = from.free_hot.back();
    from.free_hot.pop_back();
    from.all_hot.erase(std::find(from.all_hot.begin(), from.all_hot.end(), pair));
    to.all_hot.push_back(pair);
    to.free_hot.push_back(pair);
  }
}

void OffloadedSlots::Forget(int index, int32_t block) {
  Layer& layer = layers_[static_cast<size_t>(index)];
  const auto it = layer.hot_pairs.find(block);
  KVT_CHECK(it != layer.hot_pairs.end(), "layer=", index, " block=", block);
  layer.free_hot.push_back(it->second);
  layer.hot_pairs.erase(it);
  layer.hot.Remove(block);
}

std::vector<SlotPair> OffloadedSlots::Table(int layer, int position,
                                            absl::Span<const int32_t> selected) const {
  const MiddleBlocks middle = MiddleOf(position);
  const int last = position / kBlockTokens;
  std::vector<SlotPair> table;
  table.reserve(selected.size() + static_cast<size_t>(last + 1 - middle.count()));
  for (int b = 0; b < middle.first && b <= last; ++b) table.push_back(Pair(layer, b));
  for (const int32_t b : selected) {
    KVT_CHECK(b >= middle.first && b < middle.end, "block=", b, " position=", position);
    table.push_back(Pair(layer, b));
  }
  for (int b = middle.end; b <= last; ++b) table.push_back(Pair(layer, b));
  return table;
}

SlotPair OffloadedSlots::Pair(int index, int block) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const SlotPair pair = layer.pairs[static_cast<size_t>(block)];
  if (pair.base != kSlotNone) return pair;
  const auto it = layer.hot_pairs.find(block);
  return it == layer.hot_pairs.end() ? SlotPair() : it->second;
}

uint64_t OffloadedSlots::Selecting() const {
  return static_cast<uint64_t>(shape_.layers() - shape_.dense_layers());
}

uint64_t OffloadedSlots::slots() const {
  if (pool_ == nullptr) return 0;
  return shape_.Slots() +
         2 * Selecting() * static_cast<uint64_t>(std::max(0, whole_count_ - shape_.whole_max));
}

void OffloadedSlots::Release(uint64_t after_step) {
  if (pool_ == nullptr) return;
  uint64_t held = 0;
  const auto release = [&](SlotPair pair) {
    if (pair.base == kSlotNone) return;
    pool_->ReleasePair(pair, after_step);
    held += 2;
  };
  const uint64_t all = slots();
  for (const Layer& layer : layers_) {
    for (const SlotPair pair : layer.pairs) release(pair);
    for (const SlotPair pair : layer.spare) release(pair);
    for (const SlotPair pair : layer.all_hot) release(pair);
  }
  pool_->Unreserve(all - held);
  layers_.clear();
  whole_.clear();
  whole_count_ = 0;
  pool_ = nullptr;
}

}  // namespace kvt
