#include "kvstore/index/record_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "kernels/base/random.h"
#include "kernels/base/units.h"

namespace kvt {
namespace {

TEST(RecordAllocator, RecordLargerThanASlab_IsRefusedWithBothSizes) {
  RecordAllocator allocator(64 * kKiB, 16 * kKiB);
  const auto cls = allocator.ClassOf(17 * kKiB);
  ASSERT_EQ(cls.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(cls.status().message().find("17.0 KiB"), absl::string_view::npos) << cls.status();
  EXPECT_NE(cls.status().message().find("16.0 KiB"), absl::string_view::npos) << cls.status();
}

TEST(RecordAllocator, ClassesBeyondTheBound_AreRefused) {
  RecordAllocator allocator(kMiB, kMiB);
  for (uint32_t i = 1; i <= 64; ++i) ASSERT_TRUE(allocator.ClassOf(i * 64).ok());
  EXPECT_EQ(allocator.ClassOf(65 * 64).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*allocator.ClassOf(64 * 64), 63u);  // a known one still is
}

TEST(RecordAllocator, FullArena_GivesNothingUntilARecordIsFreed) {
  RecordAllocator allocator(32 * kKiB, 16 * kKiB);
  const uint32_t cls = *allocator.ClassOf(3 * kKiB);  // five a slab, 1 KiB of each slab is lost
  std::vector<uint64_t> offsets;
  while (const auto offset = allocator.TryAllocate(cls)) offsets.push_back(*offset);
  EXPECT_EQ(offsets.size(), 10u);
  EXPECT_EQ(allocator.CapacityOf(cls), 10u);
  EXPECT_EQ(allocator.used_bytes(), 30 * kKiB);
  allocator.Free(offsets[3]);
  EXPECT_EQ(allocator.TryAllocate(cls), offsets[3]);
  EXPECT_EQ(allocator.TryAllocate(cls), std::nullopt);
}

TEST(RecordAllocator, EmptySlab_ServesAnotherClass) {
  RecordAllocator allocator(32 * kKiB, 16 * kKiB);
  const uint32_t small = *allocator.ClassOf(4 * kKiB);
  const uint32_t large = *allocator.ClassOf(16 * kKiB);
  std::vector<uint64_t> offsets;
  for (int i = 0; i < 5; ++i) offsets.push_back(*allocator.TryAllocate(small));
  EXPECT_EQ(allocator.Available(large), 0u);
  allocator.Free(offsets[4]);
  EXPECT_EQ(allocator.Available(large), 1u);
  EXPECT_EQ(allocator.Available(small), 4u);
  EXPECT_EQ(allocator.TryAllocate(large), 16 * kKiB);
  EXPECT_EQ(allocator.Available(small), 0u);
}

TEST(RecordAllocator, RandomUse_NeverOverlapsAndCountsExactly) {
  const uint64_t seed = 20261129;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  RecordAllocator allocator(kMiB, 64 * kKiB);
  const std::vector<uint32_t> sizes = {1024, 3072, 10240, 65536};
  std::vector<uint32_t> classes;
  for (const uint32_t size : sizes) classes.push_back(*allocator.ClassOf(size));
  std::map<uint64_t, uint64_t> live;  // offset -> bytes
  uint64_t used = 0;
  for (int step = 0; step < 20000; ++step) {
    const size_t kind = random.Below(sizes.size());
    if (random.Below(100) < 55) {
      const uint64_t available = allocator.Available(classes[kind]);
      const auto offset = allocator.TryAllocate(classes[kind]);
      ASSERT_EQ(offset.has_value(), available > 0);
      if (!offset.has_value()) continue;
      const auto next = live.lower_bound(*offset);
      ASSERT_TRUE(next == live.end() || *offset + sizes[kind] <= next->first);
      ASSERT_TRUE(next == live.begin() ||
                  std::prev(next)->first + std::prev(next)->second <= *offset);
      ASSERT_LE(*offset + sizes[kind], kMiB);
      live[*offset] = sizes[kind];
      used += sizes[kind];
    } else if (!live.empty()) {
      auto it = live.lower_bound(random.Below(kMiB));
      if (it == live.end()) it = live.begin();
      allocator.Free(it->first);
      used -= it->second;
      live.erase(it);
    }
    ASSERT_EQ(allocator.used_bytes(), used);
  }
}

}  // namespace
}  // namespace kvt
