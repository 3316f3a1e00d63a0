// Threads that do a call's reads and writes with it: what limits is the disk, and one thread waits
// for it most of the time. Owned by the store, which joins them. Thread-safe.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"

namespace kvt {

class RocksDbIoPool {
 public:
  explicit RocksDbIoPool(int threads);
  // No call may be running.
  ~RocksDbIoPool();
  RocksDbIoPool(const RocksDbIoPool&) = delete;
  RocksDbIoPool& operator=(const RocksDbIoPool&) = delete;

  [[nodiscard]] int threads() const { return static_cast<int>(threads_.size()); }
  // Runs work(0) ... work(count - 1) on this thread and whichever of the pool are free, begun in
  // order. Returns when all have ended.
  void ForEach(size_t count, const std::function<void(size_t)>& work);

 private:
  // One ForEach. All fields are guarded by the pool's lock.
  struct Job {
    const std::function<void(size_t)>* work;
    size_t count;
    size_t next = 0;
    size_t ended = 0;
  };
  void Run();
  // Takes items of `job` until none is left.
  void Help(Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar work_;
  CondVar ended_;
  std::deque<Job*> jobs_ ABSL_GUARDED_BY(mu_);  // with items left; as many as callers
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvt
