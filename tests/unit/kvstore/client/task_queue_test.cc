#include "kvstore/client/task_queue.h"

#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kvt {
namespace {

TEST(TaskQueue_Test, RunAll_SeveralTasks_RunInOrder) {
  TaskQueue queue(8);
  std::vector<int> ran;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(queue.TryPost([&ran, i] { ran.push_back(i); }));
  EXPECT_EQ(queue.RunAll(absl::ZeroDuration()), 5u);
  EXPECT_EQ(ran, (std::vector<int>{0, 1, 2, 3, 4}));
}

TEST(TaskQueue_Test, TryPost_Full_Refuses) {
  TaskQueue queue(2);
  EXPECT_TRUE(queue.TryPost([] {}));
  EXPECT_TRUE(queue.TryPost([] {}));
  EXPECT_FALSE(queue.TryPost([] {}));
  EXPECT_TRUE(queue.Post([] {}));  // a completion still gets in
}

TEST(TaskQueue_Test, RunAll_TaskPostsAnother_RunsItNextTime) {
  TaskQueue queue(8);
  int ran = 0;
  ASSERT_TRUE(queue.TryPost([&] {
    ++ran;
    queue.Post([&] { ++ran; });
  }));
  EXPECT_EQ(queue.RunAll(absl::ZeroDuration()), 1u);
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(queue.RunAll(absl::ZeroDuration()), 1u);
  EXPECT_EQ(ran, 2);
}

TEST(TaskQueue_Test, Close_AcceptedTasksStillRunAndNewOnesAreRefused) {
  TaskQueue queue(8);
  int ran = 0;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(queue.TryPost([&] { ++ran; }));
  queue.Close();
  EXPECT_FALSE(queue.TryPost([&] { ++ran; }));
  EXPECT_FALSE(queue.Post([&] { ++ran; }));
  EXPECT_EQ(queue.RunAll(absl::ZeroDuration()), 4u);
  EXPECT_EQ(queue.RunAll(absl::Seconds(60)), 0u);  // closed: does not wait
  EXPECT_EQ(ran, 4);
}

TEST(TaskQueue_Test, RunAll_OtherThreadsPost_EveryTaskRunsOnce) {
  TaskQueue queue(10000);
  int ran = 0;
  std::vector<std::thread> producers;
  for (int i = 0; i < 3; ++i) {
    producers.emplace_back([&] {
      for (int n = 0; n < 1000; ++n) ASSERT_TRUE(queue.Post([&] { ++ran; }));
    });
  }
  size_t total = 0;
  while (total < 3000) {
    const size_t batch = queue.RunAll(absl::Seconds(10));
    ASSERT_GT(batch, 0u);
    total += batch;
  }
  for (std::thread& producer : producers) producer.join();
  EXPECT_EQ(ran, 3000);
}

TEST(RunOn_Test, ConsumerRuns_ReturnsItsStatus) {
  TaskQueue queue(8);
  std::thread consumer([&] { EXPECT_EQ(queue.RunAll(absl::Seconds(10)), 1u); });
  const absl::Status status =
      RunOn(queue, [] { return absl::NotFoundError("no such ticket"); }, absl::Seconds(10));
  EXPECT_EQ(status, absl::NotFoundError("no such ticket"));
  consumer.join();
}

TEST(RunOn_Test, NobodyConsumes_DeadlineExceeded) {
  TaskQueue queue(8);
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      RunOn(queue, [] { return absl::OkStatus(); }, absl::Milliseconds(5))));
}

TEST(RunOn_Test, QueueClosed_Unavailable) {
  TaskQueue queue(8);
  queue.Close();
  EXPECT_TRUE(absl::IsUnavailable(
      RunOn(queue, [] { return absl::OkStatus(); }, absl::Seconds(10))));
}

}  // namespace
}  // namespace kvt
