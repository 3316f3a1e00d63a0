#include "kernels/cpu/cpu_executor.h"

#include <omp.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"

namespace kvt {

CpuExecutor::CpuExecutor(const CpuDeviceOptions& options)
    : threads_(options.threads), options_(options), thread_([this] { Main(); }) {}

CpuExecutor::~CpuExecutor() {
  stop_.store(true, std::memory_order_release);
  Wake();
  thread_.join();
}

void CpuExecutor::Register(std::shared_ptr<CpuStreamQueue> queue) {
  {
    MutexLock lock(mutex_);
    registered_.push_back(std::move(queue));
  }
  has_registered_.store(true, std::memory_order_release);
  Wake();
}

void CpuExecutor::Wake() { work_.Raise(); }

void CpuExecutor::AdoptRegistered() {
  if (!has_registered_.exchange(false, std::memory_order_acq_rel)) return;
  MutexLock lock(mutex_);
  for (auto& queue : registered_) queues_.push_back(std::move(queue));
  registered_.clear();
  std::stable_sort(queues_.begin(), queues_.end(),
                   [](const auto& a, const auto& b) { return a->priority > b->priority; });
}

bool CpuExecutor::RunOne(ThreadTeam& team) {
  // Among ready streams of the highest priority take the one after the last served.
  CpuStreamQueue* chosen = nullptr;
  size_t chosen_index = 0;
  for (size_t i = 0; i < queues_.size(); ++i) {
    CpuStreamQueue& queue = *queues_[i];
    if (chosen != nullptr && queue.priority < chosen->priority) break;
    if (queue.Empty()) continue;
    if (queue.blocked_on != nullptr) {
      if (!queue.blocked_on->Reached(queue.blocked_record)) continue;
      queue.blocked_on.reset();
    }
    if (chosen == nullptr || (chosen_index < next_ && i >= next_)) {
      chosen = &queue;
      chosen_index = i;
    }
  }
  if (chosen == nullptr) return false;
  next_ = chosen_index + 1;
  const std::shared_ptr<CpuStreamQueue> keep = queues_[chosen_index];
  const uint64_t head = chosen->head.load(std::memory_order_relaxed);
  CpuOp& op = chosen->ops[head % kStreamOpsMax];
  RunOp(op, team);
  op.Destroy();
  chosen->head.store(head + 1, std::memory_order_release);
  chosen->head.notify_one();
  if (chosen->closed.load(std::memory_order_acquire)) {
    queues_.erase(queues_.begin() + static_cast<ptrdiff_t>(chosen_index));
  }
  return true;
}

void CpuExecutor::RunOp(CpuOp& op, ThreadTeam& team) {
  if (options_.profile == CpuProfile::kOff) {
    op.Run(team);
    return;
  }
  const clockid_t clock =
      options_.profile == CpuProfile::kWall ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID;
  timespec before, after;
  clock_gettime(clock, &before);
  op.Run(team);
  clock_gettime(clock, &after);
  const int64_t ns = (after.tv_sec - before.tv_sec) * 1'000'000'000 + after.tv_nsec - before.tv_nsec;
  for (OpTime& entry : profile_) {
    if (entry.name != op.name()) continue;
    ++entry.calls;
    entry.ns += ns;
    return;
  }
  profile_.push_back({op.name(), 1, ns});
}

std::vector<CpuOpTime> CpuExecutor::TakeProfile() {
  std::vector<CpuOpTime> times;
  for (const OpTime& entry : profile_) {
    times.push_back({entry.name, entry.calls, absl::Nanoseconds(entry.ns)});
  }
  profile_.clear();
  std::sort(times.begin(), times.end(),
            [](const CpuOpTime& a, const CpuOpTime& b) { return a.time > b.time; });
  return times;
}

void CpuExecutor::Main() {
  // oneDNN runs inside team members, never in a team of its own.
  omp_set_num_threads(1);
  pthread_setname_np(pthread_self(), "kvt-executor");
  ThreadTeam team(threads_, options_.pin, options_.spin, [](int) {
    omp_set_num_threads(1);
    pthread_setname_np(pthread_self(), "kvt-team");
  });
  // After the members were started: they inherit this thread's processors and bind themselves.
  if (options_.pin) PinThisThread(0);
  for (;;) {
    const uint32_t seen = work_.Value();
    AdoptRegistered();
    if (RunOne(team)) continue;
    if (stop_.load(std::memory_order_acquire)) break;
    work_.WaitWhile(seen, team.spin_ticks());
  }
  KVT_CHECK(queues_.empty(), queues_.size(), " streams outlive their device");
}

}  // namespace kvt
