// A few threads for control calls that block (the stores' RPC stubs are synchronous), so that
// several stores are asked at once and background renewals hold up nobody. The data path does not
// use it.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"

namespace kvt {

// Calls waiting for a thread; one more is refused.
inline constexpr int kCallPoolQueueMax = 1024;

// Owned by the composition root, which thereby owns the threads; outlives the TierClient that uses
// it. Thread-safe. A call must end by a deadline of its own.
class CallPool {
 public:
  explicit CallPool(int threads);
  ~CallPool();  // Stop()
  CallPool(const CallPool&) = delete;
  CallPool& operator=(const CallPool&) = delete;

  // Queues `call`; false, without having queued it, when the queue is full or the pool has stopped.
  [[nodiscard]] bool TryRun(std::function<void()> call);
  // Refuses new calls, runs those that are queued, joins. Idempotent.
  void Stop();

 private:
  void Loop();

  Mutex mu_;
  CondVar wake_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvt
