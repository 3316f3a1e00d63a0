#include "kvstore/media/rocksdb_io_pool.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt {
namespace {

// Waits are re-checked loops; this is how often without a signal.
constexpr absl::Duration kRecheck = absl::Seconds(5);

}  // namespace

RocksDbIoPool::RocksDbIoPool(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

RocksDbIoPool::~RocksDbIoPool() {
  {
    MutexLock lock(mu_);
    KVT_CHECK(jobs_.empty(), "a call is still running");
    stopping_ = true;
    work_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void RocksDbIoPool::ForEach(size_t count, const std::function<void(size_t)>& work) {
  if (count == 0) return;
  if (count == 1) {
    work(0);
    return;
  }
  MutexLock lock(mu_);
  Job job{&work, count};
  jobs_.push_back(&job);
  for (size_t i = 1; i < std::min(count, threads_.size() + 1); ++i) work_.NotifyOne();
  Help(job);
  while (job.ended < job.count) (void)ended_.WaitFor(mu_, kRecheck);
}

void RocksDbIoPool::Help(Job& job) {
  while (job.next < job.count) {
    const size_t item = job.next++;
    if (job.next == job.count) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    mu_.Unlock();
    (*job.work)(item);
    mu_.Lock();
    // The last one: the job ends with its caller's wait, and is not touched after this.
    if (++job.ended == job.count) {
      ended_.NotifyAll();
      return;
    }
  }
}

void RocksDbIoPool::Run() {
  MutexLock lock(mu_);
  while (!stopping_) {
    if (jobs_.empty()) {
      (void)work_.WaitFor(mu_, kRecheck);
      continue;
    }
    Help(*jobs_.front());
  }
}

}  // namespace kvt
