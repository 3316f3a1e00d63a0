#include "decode_worker/schedule/batch_schedule.h"
#include "decode_worker/schedule/pull_schedule.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvt {
namespace {

using testing::ElementsAre;

const absl::Time kStart = absl::FromUnixSeconds(1000);

TEST(BatchSchedule_Test, TakeBatch_AllFit_EveryoneSteps) {
  BatchSchedule schedule;
  for (const uint64_t s : {5, 3, 9}) schedule.Add(s);
  EXPECT_THAT(schedule.TakeBatch(8), ElementsAre(5, 3, 9));
  EXPECT_THAT(schedule.TakeBatch(8), ElementsAre(5, 3, 9));
}

TEST(BatchSchedule_Test, TakeBatch_FewerRows_LongestWaitingFirst) {
  BatchSchedule schedule;
  for (const uint64_t s : {1, 2, 3}) schedule.Add(s);
  EXPECT_THAT(schedule.TakeBatch(2), ElementsAre(1, 2));
  EXPECT_THAT(schedule.TakeBatch(2), ElementsAre(3, 1));
  schedule.Add(4);
  EXPECT_THAT(schedule.TakeBatch(2), ElementsAre(2, 3));
  EXPECT_THAT(schedule.TakeBatch(2), ElementsAre(1, 4));
}

TEST(BatchSchedule_Test, Remove_EndedSequence_StepsNoMore) {
  BatchSchedule schedule;
  for (const uint64_t s : {1, 2}) schedule.Add(s);
  schedule.Remove(1);
  EXPECT_THAT(schedule.TakeBatch(8), ElementsAre(2));
  schedule.Remove(2);
  EXPECT_TRUE(schedule.empty());
  EXPECT_TRUE(schedule.TakeBatch(8).empty());
}

TEST(PullSchedule_Test, Start_SameAge_SmallestFirst) {
  PullSchedule schedule(8);
  schedule.Add(1, 100 * kMiB, kStart);
  schedule.Add(2, 1 * kMiB, kStart);
  schedule.Add(3, 10 * kMiB, kStart);
  EXPECT_EQ(schedule.Start(), 2u);
  EXPECT_EQ(schedule.Start(), 3u);
  EXPECT_EQ(schedule.Start(), 1u);
  EXPECT_EQ(schedule.Start(), std::nullopt);
}

TEST(PullSchedule_Test, Start_LargeOneAged_GoesBeforeLaterSmallOnes) {
  PullSchedule schedule(8);
  schedule.Add(1, 100 * kMiB, kStart);
  schedule.Add(2, 1 * kMiB, kStart + absl::Seconds(1));
  schedule.Add(3, 1 * kMiB, kStart + absl::Seconds(2));
  EXPECT_EQ(schedule.Start(), 2u);
  EXPECT_EQ(schedule.Start(), 1u);  // 100 MiB are 1.6 s of ageing
  EXPECT_EQ(schedule.Start(), 3u);
}

TEST(PullSchedule_Test, Start_PullsMax_NextWaitsForOneToFinish) {
  PullSchedule schedule(1);
  schedule.Add(1, 1, kStart);
  schedule.Add(2, 1, kStart + absl::Seconds(1));
  EXPECT_EQ(schedule.Start(), 1u);
  EXPECT_EQ(schedule.Start(), std::nullopt);
  schedule.Finished();
  schedule.Remove(2);
  EXPECT_EQ(schedule.Start(), std::nullopt);
  EXPECT_EQ(schedule.waiting(), 0u);
}

}  // namespace
}  // namespace kvt
