// A bounded queue of closures: how RPC threads, transport callbacks, device callbacks and control
// threads hand work to the one thread that owns a worker's state (its engine). Makes no thread.
//
// Thread-safety: Post, TryPost, Close and size by any thread; RunAll by the consumer.
// Life cycle: Close refuses new tasks; what was accepted still runs.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace kvt {

using Task = std::function<void()>;

class TaskQueue {
 public:
  // `tasks_max` bounds TryPost. Post is for tasks whose number is bounded elsewhere (completions of
  // bounded operations): it takes up to twice as many, beyond that is a bug (KVT_CHECKed).
  explicit TaskQueue(size_t tasks_max) : tasks_max_(tasks_max) {}
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  // False when the queue is full or closed.
  [[nodiscard]] bool TryPost(Task task);
  // False when the queue is closed.
  bool Post(Task task);
  // Runs every task that is there; waits up to `timeout` for the first. Returns how many ran.
  size_t RunAll(absl::Duration timeout);
  void Close();
  [[nodiscard]] bool closed() const;
  [[nodiscard]] size_t size() const;

 private:
  const size_t tasks_max_;
  mutable Mutex mu_;
  CondVar arrived_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

// Runs `call` on the queue's consumer and returns what it returned: how an RPC thread asks an engine.
// Unavailable when the queue is closed or full, DeadlineExceeded when it did not run in time (it may
// still run later, so it must own what it captures).
absl::Status RunOn(TaskQueue& queue, std::function<absl::Status()> call, absl::Duration timeout);

}  // namespace kvt
