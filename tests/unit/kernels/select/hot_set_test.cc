#include "kernels/select/hot_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "kernels/base/random.h"

namespace kvt {
namespace {

using Blocks = std::vector<int32_t>;

TEST(HotSet, SelectionsCountAndFade) {
  HotSet set(4);
  EXPECT_EQ(set.Use(Blocks{1, 2}).misses, (Blocks{1, 2}));
  EXPECT_TRUE(set.Use(Blocks{1, 2}).misses.empty());
  EXPECT_EQ(set.Use(Blocks{3, 4}).misses, (Blocks{3, 4}));  // full
  const HotSet::Change change = set.Use(Blocks{1, 5});      // 2 was selected twice, 3 and 4 once
  EXPECT_EQ(change.misses, (Blocks{5}));
  EXPECT_EQ(change.evicted, (Blocks{4}));
  EXPECT_EQ(set.Use(Blocks{6}).evicted, (Blocks{3}));
  EXPECT_EQ(set.Use(Blocks{1, 7}).evicted, (Blocks{5}));
  EXPECT_TRUE(set.Contains(1));
  EXPECT_TRUE(set.Contains(2));
  int32_t other = 8;
  while (set.Contains(2)) {  // others that come twice outlast it
    ASSERT_LT(other, 60);
    (void)set.Use(Blocks{other});
    (void)set.Use(Blocks{other++});
  }
}

TEST(HotSet, SelectionOfFullCapacity_ReplacesEverything) {
  HotSet set(3);
  (void)set.Use(Blocks{1, 2, 3});
  const HotSet::Change change = set.Use(Blocks{4, 5, 6});
  EXPECT_EQ(change.evicted.size(), 3u);
  EXPECT_EQ(set.size(), 3);
  EXPECT_FALSE(set.Contains(1));
}

TEST(HotSet, FewerSlots_EvictTheLeastValuable) {
  HotSet set(4);
  (void)set.Use(Blocks{1, 2, 3, 4});
  (void)set.Use(Blocks{2});
  EXPECT_EQ(set.SetCapacity(2), (Blocks{3, 4}));
  EXPECT_EQ(set.capacity(), 2);
  EXPECT_TRUE(set.Contains(2));
}

SelectionTrace RandomTrace(int steps, int blocks, int selected, uint64_t seed) {
  Random random(seed);
  SelectionTrace trace;
  Blocks now;
  for (int i = 0; i < selected; ++i) now.push_back(i);
  for (int s = 0; s < steps; ++s) {
    for (int32_t& block : now) {
      if (random.Below(3) != 0) continue;
      int32_t other = 0;
      do other = static_cast<int32_t>(random.Below(static_cast<uint64_t>(blocks)));
      while (std::find(now.begin(), now.end(), other) != now.end());
      block = other;
    }
    std::sort(now.begin(), now.end());
    trace.push_back(now);
  }
  return trace;
}

// The fewest misses of any policy, by trying all ways to evict.
int FewestMisses(const SelectionTrace& trace, size_t step, Blocks held, int capacity) {
  if (step == trace.size()) return 0;
  int missed = 0;
  for (const int32_t block : trace[step]) {
    if (std::find(held.begin(), held.end(), block) == held.end()) {
      held.push_back(block);
      ++missed;
    }
  }
  if (step == 0) missed = 0;
  int best = 1 << 20;
  const std::function<void(Blocks, size_t)> evict = [&](Blocks rest, size_t from) {
    if (static_cast<int>(rest.size()) <= capacity) {
      best = std::min(best, FewestMisses(trace, step + 1, rest, capacity));
      return;
    }
    for (size_t i = from; i < rest.size(); ++i) {
      const Blocks& wanted = trace[step];
      if (std::find(wanted.begin(), wanted.end(), rest[i]) != wanted.end()) continue;
      Blocks less = rest;
      less.erase(less.begin() + static_cast<ptrdiff_t>(i));
      evict(std::move(less), i);
    }
  };
  evict(held, 0);
  return missed + best;
}

TEST(Belady, SmallTraces_NoPolicyMissesLess) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    const SelectionTrace trace = RandomTrace(6, 7, 2, seed);
    const std::vector<int> misses = BeladyMisses(trace, 3);
    EXPECT_EQ(std::accumulate(misses.begin(), misses.end(), 0), FewestMisses(trace, 0, {}, 3))
        << "seed " << seed;
  }
}

TEST(Belady, LongTraces_NeverMoreMissesThanTheHotSet) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const SelectionTrace trace = RandomTrace(200, 60, 8, seed);
    int last = 1 << 20;
    for (const int capacity : {8, 12, 16, 32}) {
      const std::vector<int> best = BeladyMisses(trace, capacity);
      const std::vector<int> ours = HotSetMisses(trace, capacity);
      const int best_sum = std::accumulate(best.begin(), best.end(), 0);
      EXPECT_LE(best_sum, std::accumulate(ours.begin(), ours.end(), 0));
      EXPECT_LE(best_sum, last);
      last = best_sum;
    }
  }
}

TEST(HotSet, Remove_BlockMissesTheNextTime) {
  HotSet set(3);
  (void)set.Use({1, 2, 3});
  set.Remove(2);
  set.Remove(9);  // not there
  EXPECT_EQ(set.size(), 2);
  const HotSet::Change change = set.Use({2, 3});
  EXPECT_EQ(change.misses, (std::vector<int32_t>{2}));
  EXPECT_TRUE(change.evicted.empty());
}

TEST(HotSet, Probe_CountsWhatMoreSlotsWouldHitAndFewerWouldMiss) {
  HotSet set(4, 2);
  (void)set.Use({1, 2});
  (void)set.Use({3, 4});
  (void)set.Use({5, 6});  // 1 and 2 are evicted
  EXPECT_EQ(set.Gain() + set.Loss(), 0);
  (void)set.Use({1});  // 4 + 2 slots would hold it
  EXPECT_EQ(set.Gain(), 1);
  (void)set.Use({3});  // of the last two places
  EXPECT_EQ(set.Loss(), 1);
  set.ResetProbe();
  (void)set.Use({3});  // the first place
  EXPECT_EQ(set.Gain() + set.Loss(), 0);
}

TEST(DivideSlots, GoesToTheSteepestLayers) {
  const std::vector<MissCurve> curves = {{4, 2, {10, 1, 0, 0}}, {4, 2, {2, 1, 0.5, 0.25}}, {4, 2, {0, 0, 0, 0}}};
  EXPECT_EQ(DivideSlots(curves, 12), (std::vector<int>{4, 4, 4}));
  EXPECT_EQ(DivideSlots(curves, 14), (std::vector<int>{6, 4, 4}));
  EXPECT_EQ(DivideSlots(curves, 17), (std::vector<int>{8, 4, 4}));  // a tie: the lower layer
  EXPECT_EQ(DivideSlots(curves, 100), (std::vector<int>{8, 10, 4}));
}

TEST(DivideSlots, FallBehindAFlatPart_IsSeen) {
  const std::vector<MissCurve> curves = {{0, 1, {10, 10, 10, 0}}, {0, 1, {10, 9, 8, 7}}};
  EXPECT_EQ(DivideSlots(curves, 3), (std::vector<int>{3, 0}));
  EXPECT_EQ(DivideSlots(curves, 2), (std::vector<int>{0, 2}));
}

}  // namespace
}  // namespace kvt
