#include "kernels/select/hot_set.h"

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "kernels/base/check.h"

namespace kvt {

namespace {

constexpr float kFading = 0.9f;

}  // namespace

bool HotSet::Contains(int32_t block) const {
  return std::any_of(order_.begin(), order_.end(), [&](const Held& h) { return h.block == block; });
}

std::vector<int32_t> HotSet::Blocks() const {
  std::vector<int32_t> blocks;
  for (const Held& held : order_) blocks.push_back(held.block);
  return blocks;
}

HotSet::Change HotSet::Use(absl::Span<const int32_t> blocks) {
  KVT_CHECK(static_cast<int>(blocks.size()) <= capacity_, "selected=", blocks.size(), " capacity=",
            capacity_);
  absl::flat_hash_set<int32_t> fresh(blocks.begin(), blocks.end());
  KVT_CHECK(fresh.size() == blocks.size(), "a block is selected twice");
  for (size_t i = static_cast<size_t>(std::max(0, capacity_ - probe_)); i < order_.size(); ++i) {
    if (fresh.contains(order_[i].block)) ++loss_;
  }
  const auto back = std::remove_if(ghosts_.begin(), ghosts_.end(),
                                   [&](int32_t block) { return fresh.contains(block); });
  gain_ += static_cast<int>(ghosts_.end() - back);
  ghosts_.erase(back, ghosts_.end());
  // All fade alike, so what is in order stays so: hits, then fresh ones, then the rest.
  std::vector<Held> before(order_.size()), rest;
  const auto middle = order_.begin() + static_cast<ptrdiff_t>(selected_);
  std::merge(order_.begin(), middle, middle, order_.end(), before.begin(),
             [](const Held& a, const Held& b) { return a.worth > b.worth; });
  order_.clear();
  for (const Held& held : before) {
    const float worth = held.worth * kFading;
    if (fresh.erase(held.block) > 0) {
      order_.push_back({held.block, worth + 1});
    } else {
      rest.push_back({held.block, worth});
    }
  }
  Change change;
  for (const int32_t block : blocks) {
    if (!fresh.contains(block)) continue;
    change.misses.push_back(block);
    order_.push_back({block, 1});
  }
  selected_ = order_.size();
  order_.insert(order_.end(), rest.begin(), rest.end());
  change.evicted = SetCapacity(capacity_);
  return change;
}

void HotSet::Remove(int32_t block) {
  for (size_t i = 0; i < order_.size(); ++i) {
    if (order_[i].block != block) continue;
    order_.erase(order_.begin() + static_cast<ptrdiff_t>(i));
    if (i < selected_) --selected_;
    return;
  }
}

std::vector<int32_t> HotSet::SetCapacity(int capacity) {
  KVT_CHECK(capacity >= 0, "capacity=", capacity);
  capacity_ = capacity;
  std::vector<int32_t> evicted;
  for (size_t i = static_cast<size_t>(capacity); i < order_.size(); ++i) {
    evicted.push_back(order_[i].block);
  }
  if (evicted.empty()) return evicted;
  order_.resize(static_cast<size_t>(capacity));
  selected_ = std::min(selected_, order_.size());
  ghosts_.insert(ghosts_.begin(), evicted.begin(), evicted.end());
  if (static_cast<int>(ghosts_.size()) > probe_) ghosts_.resize(static_cast<size_t>(probe_));
  return evicted;
}

std::vector<int> HotSetMisses(const SelectionTrace& trace, int capacity) {
  HotSet set(capacity);
  std::vector<int> misses;
  for (size_t step = 0; step < trace.size(); ++step) {
    const HotSet::Change change = set.Use(trace[step]);
    if (step > 0) misses.push_back(static_cast<int>(change.misses.size()));
  }
  return misses;
}

std::vector<int> BeladyMisses(const SelectionTrace& trace, int capacity) {
  // next[step][i]: the step after `step` that selects trace[step][i] again.
  constexpr size_t kNever = std::numeric_limits<size_t>::max();
  std::vector<std::vector<size_t>> next(trace.size());
  absl::flat_hash_map<int32_t, size_t> seen;
  for (size_t step = trace.size(); step-- > 0;) {
    for (const int32_t block : trace[step]) {
      const auto it = seen.find(block);
      next[step].push_back(it == seen.end() ? kNever : it->second);
    }
    for (const int32_t block : trace[step]) seen[block] = step;
  }
  absl::flat_hash_map<int32_t, size_t> held;  // block -> its next use
  std::vector<int> misses;
  for (size_t step = 0; step < trace.size(); ++step) {
    KVT_CHECK(static_cast<int>(trace[step].size()) <= capacity, "capacity=", capacity);
    int missed = 0;
    for (size_t i = 0; i < trace[step].size(); ++i) {
      if (!held.contains(trace[step][i])) ++missed;
      held[trace[step][i]] = next[step][i];
    }
    if (step > 0) misses.push_back(missed);
    if (static_cast<int>(held.size()) <= capacity) continue;
    std::vector<std::pair<size_t, int32_t>> order;
    const absl::flat_hash_set<int32_t> wanted(trace[step].begin(), trace[step].end());
    for (const auto& [block, use] : held) {
      if (!wanted.contains(block)) order.emplace_back(use, block);
    }
    std::sort(order.rbegin(), order.rend());
    for (size_t i = 0; static_cast<int>(held.size()) > capacity; ++i) held.erase(order[i].second);
  }
  return misses;
}

std::vector<int> DivideSlots(const std::vector<MissCurve>& curves, int total) {
  std::vector<int> slots;
  int left = total;
  for (const MissCurve& curve : curves) {
    KVT_CHECK(curve.step > 0 && !curve.misses.empty(), "step=", curve.step);
    slots.push_back(curve.least);
    left -= curve.least;
  }
  KVT_CHECK(left >= 0, "total=", total, " for ", curves.size(), " layers, short by ", -left);
  std::vector<size_t> at(curves.size());
  for (;;) {
    size_t best = curves.size(), best_steps = 0;
    double best_fall = 0;
    for (size_t layer = 0; layer < curves.size(); ++layer) {
      const MissCurve& curve = curves[layer];
      const size_t room =
          std::min(curve.misses.size() - 1 - at[layer], static_cast<size_t>(left / curve.step));
      for (size_t steps = 1; steps <= room; ++steps) {
        const double fall = (curve.misses[at[layer]] - curve.misses[at[layer] + steps]) /
                            static_cast<double>(curve.step * static_cast<int>(steps));
        if (fall > best_fall) {
          best = layer;
          best_steps = steps;
          best_fall = fall;
        }
      }
    }
    if (best == curves.size()) return slots;
    const int more = curves[best].step * static_cast<int>(best_steps);
    at[best] += best_steps;
    slots[best] += more;
    left -= more;
  }
}

}  // namespace kvt
