#include "kvstore/client/task_queue.h"

#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"

namespace kvt {

bool TaskQueue::TryPost(Task task) {
  {
    MutexLock lock(mu_);
    if (closed_ || tasks_.size() >= tasks_max_) return false;
    tasks_.push_back(std::move(task));
  }
  arrived_.NotifyOne();
  return true;
}

bool TaskQueue::Post(Task task) {
  {
    MutexLock lock(mu_);
    if (closed_) return false;
    KVT_CHECK(tasks_.size() < 2 * tasks_max_, "tasks=", tasks_.size());
    tasks_.push_back(std::move(task));
  }
  arrived_.NotifyOne();
  return true;
}

size_t TaskQueue::RunAll(absl::Duration timeout) {
  std::deque<Task> batch;
  {
    MutexLock lock(mu_);
    const absl::Time deadline = RealClock::Get().Now() + timeout;
    while (tasks_.empty() && !closed_) {
      const absl::Duration left = deadline - RealClock::Get().Now();
      if (left <= absl::ZeroDuration()) break;
      arrived_.WaitFor(mu_, left);
    }
    batch.swap(tasks_);
  }
  for (Task& task : batch) task();
  return batch.size();
}

void TaskQueue::Close() {
  {
    MutexLock lock(mu_);
    closed_ = true;
  }
  arrived_.NotifyAll();
}

bool TaskQueue::closed() const {
  MutexLock lock(mu_);
  return closed_;
}

size_t TaskQueue::size() const {
  MutexLock lock(mu_);
  return tasks_.size();
}

}  // namespace kvt
