#include "kvstore/client/call_pool.h"

#include <atomic>

#include "gtest/gtest.h"
#include "kernels/base/mutex.h"

namespace kvt {
namespace {

// Holds calls until it is opened.
class Latch {
 public:
  void Open() {
    MutexLock lock(mu_);
    open_ = true;
    changed_.NotifyAll();
  }
  void Wait() {
    MutexLock lock(mu_);
    while (!open_) changed_.WaitFor(mu_, absl::Seconds(1));
  }

 private:
  Mutex mu_;
  CondVar changed_;
  bool open_ ABSL_GUARDED_BY(mu_) = false;
};

TEST(CallPool, Stop_RunsWhatWasQueuedAndRefusesTheRest) {
  std::atomic<int> ran{0};
  Latch latch;
  CallPool pool(2);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(pool.TryRun([&] {
      latch.Wait();
      ++ran;
    }));
  }
  latch.Open();
  pool.Stop();
  EXPECT_EQ(ran, 10);
  EXPECT_FALSE(pool.TryRun([&] { ++ran; }));
  pool.Stop();
  EXPECT_EQ(ran, 10);
}

TEST(CallPool, FullQueue_RefusesWithoutBlocking) {
  Latch latch;
  Latch started;
  CallPool pool(1);
  ASSERT_TRUE(pool.TryRun([&] {
    started.Open();
    latch.Wait();
  }));
  started.Wait();
  for (int i = 0; i < kCallPoolQueueMax; ++i) ASSERT_TRUE(pool.TryRun([] {})) << i;
  EXPECT_FALSE(pool.TryRun([] {}));
  latch.Open();
}

}  // namespace
}  // namespace kvt
