#include "prefill_worker/admission_queue.h"

#include "gtest/gtest.h"

namespace kvt {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(100);

TEST(AdmissionQueue_Test, Pop_AllFit_FirstComeFirstServed) {
  AdmissionQueue queue(8, absl::Seconds(10));
  for (const uint64_t job : {3, 1, 2}) ASSERT_TRUE(queue.TryPush(job, 10, kStart));
  for (const uint64_t job : {3, 1, 2}) EXPECT_EQ(queue.Pop(100, kStart), job);
  EXPECT_EQ(queue.Pop(100, kStart), std::nullopt);
}

TEST(AdmissionQueue_Test, Pop_HeadDoesNotFit_SmallerOneOvertakes) {
  AdmissionQueue queue(8, absl::Seconds(10));
  ASSERT_TRUE(queue.TryPush(1, 100, kStart));
  ASSERT_TRUE(queue.TryPush(2, 10, kStart));
  EXPECT_EQ(queue.Pop(50, kStart + absl::Seconds(9)), 2u);
}

TEST(AdmissionQueue_Test, Pop_HeadHasAged_NobodyOvertakesIt) {
  AdmissionQueue queue(8, absl::Seconds(10));
  ASSERT_TRUE(queue.TryPush(1, 100, kStart));
  ASSERT_TRUE(queue.TryPush(2, 10, kStart + absl::Seconds(5)));
  EXPECT_EQ(queue.Pop(50, kStart + absl::Seconds(10)), std::nullopt);
  EXPECT_EQ(queue.Pop(100, kStart + absl::Seconds(11)), 1u);
  EXPECT_EQ(queue.Pop(50, kStart + absl::Seconds(11)), 2u);
}

TEST(AdmissionQueue_Test, Return_AfterItsPause_GoesFirstByItsAge) {
  AdmissionQueue queue(2, absl::Seconds(10));
  ASSERT_TRUE(queue.TryPush(1, 10, kStart));
  ASSERT_EQ(queue.Pop(100, kStart), 1u);
  ASSERT_TRUE(queue.TryPush(2, 10, kStart + absl::Seconds(1)));
  ASSERT_TRUE(queue.TryPush(3, 10, kStart + absl::Seconds(2)));
  queue.Return(1, 10, kStart, kStart + absl::Seconds(3));  // though the queue is full
  EXPECT_EQ(queue.Pop(100, kStart + absl::Seconds(2)), 2u);  // 1 pauses and bars nobody
  EXPECT_EQ(queue.Pop(100, kStart + absl::Seconds(3)), 1u);
  EXPECT_EQ(queue.Pop(100, kStart + absl::Seconds(3)), 3u);
}

TEST(AdmissionQueue_Test, TryPush_Full_Refuses) {
  AdmissionQueue queue(2, absl::Seconds(10));
  EXPECT_TRUE(queue.TryPush(1, 1, kStart));
  EXPECT_TRUE(queue.TryPush(2, 1, kStart));
  EXPECT_FALSE(queue.TryPush(3, 1, kStart));
  queue.Remove(1);
  EXPECT_TRUE(queue.TryPush(3, 1, kStart));
  EXPECT_EQ(queue.Pop(9, kStart), 2u);
}

}  // namespace
}  // namespace kvt
