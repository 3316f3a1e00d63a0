#include "kvstore/client/call_pool.h"

#include <utility>

#include "kernels/base/check.h"

namespace kvt {

CallPool::CallPool(int threads) {
  KVT_CHECK(threads > 0 && threads <= 64, "threads=", threads);
  threads_.reserve(threads);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
}

CallPool::~CallPool() { Stop(); }

bool CallPool::TryRun(std::function<void()> call) {
  {
    MutexLock lock(mu_);
    if (stopping_ || queue_.size() >= kCallPoolQueueMax) return false;
    queue_.push_back(std::move(call));
  }
  wake_.NotifyOne();
  return true;
}

void CallPool::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void CallPool::Loop() {
  while (true) {
    std::function<void()> call;
    {
      MutexLock lock(mu_);
      while (queue_.empty() && !stopping_) wake_.WaitFor(mu_, absl::Seconds(60));
      if (queue_.empty()) return;
      call = std::move(queue_.front());
      queue_.pop_front();
    }
    call();
  }
}

}  // namespace kvt
