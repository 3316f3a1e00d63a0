#include "kvstore/client/task_queue.h"

#include <memory>
#include <optional>
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

absl::Status RunOn(TaskQueue& queue, std::function<absl::Status()> call, absl::Duration timeout) {
  struct Answer {
    Mutex mu;
    CondVar came;
    std::optional<absl::Status> status ABSL_GUARDED_BY(mu);
  };
  auto answer = std::make_shared<Answer>();
  const bool posted = queue.TryPost([answer, call = std::move(call)] {
    absl::Status status = call();
    MutexLock lock(answer->mu);
    answer->status = std::move(status);
    answer->came.NotifyAll();
  });
  if (!posted) return absl::UnavailableError("the worker is stopping or overloaded");
  const absl::Time deadline = RealClock::Get().Now() + timeout;
  MutexLock lock(answer->mu);
  while (!answer->status.has_value()) {
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError("the worker's engine did not answer in time");
    }
    answer->came.WaitFor(answer->mu, left);
  }
  return *answer->status;
}

}  // namespace kvt
