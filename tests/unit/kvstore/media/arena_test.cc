#include "kvstore/media/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/base/units.h"
#include "kvstore/node/arena_populate.h"

namespace kvt {
namespace {

TEST(Arena, MoreThanTheMachineHas_IsRefusedWithSizesAndRemedy) {
  const auto arena = Arena::Create(uint64_t{1} << 46, 16);
  ASSERT_EQ(arena.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(arena.status().message().find("65536.00 GiB"), absl::string_view::npos)
      << arena.status();
  EXPECT_NE(arena.status().message().find("available"), absl::string_view::npos);
}

TEST(Arena, Populate_CoversAllOfItWithSeveralThreads) {
  auto arena = Arena::Create(130 * kMiB, 16);  // not a multiple of the chunks
  ASSERT_TRUE(arena.ok()) << arena.status();
  ASSERT_TRUE(PopulateArena(*arena, 3, [] { return false; }).ok());
  for (uint64_t at = 0; at < arena->size(); at += 4 * kKiB) {
    ASSERT_EQ(arena->data()[at], std::byte{0});
  }
  EXPECT_EQ(arena->bytes().size(), 130 * kMiB);
  EXPECT_FALSE(arena->table().Find(1).has_value());
}

TEST(Arena, F20_Populate_TellsItsProgressFromNothingToAll) {
  auto arena = Arena::Create(512 * kMiB, 16);
  ASSERT_TRUE(arena.ok()) << arena.status();
  std::vector<uint64_t> told;
  ASSERT_TRUE(PopulateArena(*arena, 1, [] { return false; },
                            [&](uint64_t done) { told.push_back(done); }).ok());
  EXPECT_EQ(told.front(), 0u);
  EXPECT_EQ(told.back(), 512 * kMiB);
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
}

TEST(Arena, PopulateThatIsStopped_EndsCancelled) {
  auto arena = Arena::Create(256 * kMiB, 16);
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ(PopulateArena(*arena, 1, [] { return true; }).code(), absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace kvt
