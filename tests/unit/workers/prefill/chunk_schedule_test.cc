#include "prefill_worker/chunk_schedule.h"

#include <map>
#include <memory>
#include <vector>

#include "gtest/gtest.h"

namespace kvt {
namespace {

TEST(ChunkSchedule_Test, TakeStep_TwoLongJobs_TakeTurns) {
  PrefillPlan a(1000);
  PrefillPlan b(1000);
  ChunkSchedule schedule;
  schedule.Add(1, &a);
  schedule.Add(2, &b);
  for (const uint64_t expected : {1, 2, 1, 2}) {
    const auto step = schedule.TakeStep(256, 8);
    ASSERT_EQ(step.size(), 1u);
    EXPECT_EQ(step[0].job, expected);
    EXPECT_EQ(step[0].range.size(), 256 - (step[0].range.begin == 768 ? 24 : 0));
  }
}

TEST(ChunkSchedule_Test, TakeStep_ShortJobs_ShareAStep) {
  PrefillPlan a(40);
  PrefillPlan b(30);
  PrefillPlan c(500);
  ChunkSchedule schedule;
  schedule.Add(1, &a);
  schedule.Add(2, &b);
  schedule.Add(3, &c);
  const auto step = schedule.TakeStep(256, 8);
  ASSERT_EQ(step.size(), 3u);
  EXPECT_EQ(step[0].range, (TokenRange{0, 40}));
  EXPECT_TRUE(step[0].last);
  EXPECT_EQ(step[1].range, (TokenRange{0, 30}));
  EXPECT_TRUE(step[1].last);
  EXPECT_EQ(step[2].range, (TokenRange{0, 176}));  // 186 rows were left: whole blocks
  EXPECT_FALSE(step[2].last);
  EXPECT_EQ(schedule.size(), 1u);
}

TEST(ChunkSchedule_Test, TakeStep_ShortJobBehindLongOne_WaitsOneChunk) {
  PrefillPlan a(6000);
  PrefillPlan b(20);
  ChunkSchedule schedule;
  schedule.Add(1, &a);
  schedule.Add(2, &b);
  EXPECT_EQ(schedule.TakeStep(256, 8)[0].job, 1u);
  const auto step = schedule.TakeStep(256, 8);
  ASSERT_EQ(step.size(), 2u);
  EXPECT_EQ(step[0].job, 2u);
  EXPECT_TRUE(step[0].last);
  EXPECT_EQ(step[1].job, 1u);
}

TEST(ChunkSchedule_Test, TakeStep_SegmentsMax_LeavesTheRestForTheNextStep) {
  PrefillPlan a(10);
  PrefillPlan b(10);
  PrefillPlan c(10);
  ChunkSchedule schedule;
  schedule.Add(1, &a);
  schedule.Add(2, &b);
  schedule.Add(3, &c);
  EXPECT_EQ(schedule.TakeStep(256, 2).size(), 2u);
  const auto step = schedule.TakeStep(256, 2);
  ASSERT_EQ(step.size(), 1u);
  EXPECT_EQ(step[0].job, 3u);
  EXPECT_TRUE(schedule.empty());
}

TEST(ChunkSchedule_Test, Remove_CancelledJob_GetsNoMoreRows) {
  PrefillPlan a(1000);
  PrefillPlan b(1000);
  ChunkSchedule schedule;
  schedule.Add(1, &a);
  schedule.Add(2, &b);
  (void)schedule.TakeStep(256, 8);
  schedule.Remove(1);
  EXPECT_EQ(schedule.TakeStep(256, 8)[0].job, 2u);
  EXPECT_EQ(schedule.TakeStep(256, 8)[0].job, 2u);
}

TEST(ChunkSchedule_Test, TakeStep_ManyJobs_EveryoneFinishesAndNobodyWaitsForMoreThanATurnEach) {
  constexpr int kJobs = 7;
  std::vector<std::unique_ptr<PrefillPlan>> plans;
  ChunkSchedule schedule;
  for (uint64_t job = 0; job < kJobs; ++job) {
    plans.push_back(std::make_unique<PrefillPlan>(static_cast<int>(300 + 250 * job)));
    schedule.Add(job, plans.back().get());
  }
  std::map<uint64_t, int> served_at;
  int step_number = 0;
  while (!schedule.empty()) {
    ++step_number;
    ASSERT_LT(step_number, 1000);
    for (const ChunkTurn& turn : schedule.TakeStep(256, 4)) {
      ASSERT_LE(step_number - served_at[turn.job], kJobs);
      served_at[turn.job] = turn.last ? 1 << 20 : step_number;
    }
  }
  for (const auto& plan : plans) EXPECT_TRUE(plan->AllTaken());
}

}  // namespace
}  // namespace kvt
