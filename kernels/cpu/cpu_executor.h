// The executor of the CPU device: one thread that drains all stream rings by priority, operation by
// operation (round robin among equals), on the team whose member 0 it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/cpu/cpu_device.h"
#include "kernels/cpu/cpu_stream.h"
#include "kernels/cpu/thread_team.h"

namespace kvt {

class CpuExecutor {
 public:
  explicit CpuExecutor(const CpuDeviceOptions& options);
  // All streams are destroyed.
  ~CpuExecutor();

  void Register(std::shared_ptr<CpuStreamQueue> queue);
  // An operation was published.
  void Wake();
  [[nodiscard]] int threads() const { return threads_; }
  // All streams are drained.
  [[nodiscard]] std::vector<CpuOpTime> TakeProfile();
  [[nodiscard]] bool OnExecutorThread() const {
    return std::this_thread::get_id() == thread_.get_id();
  }

 private:
  void Main();
  // Runs one operation of the first stream that has one ready; false when none has.
  bool RunOne(ThreadTeam& team);
  void AdoptRegistered();
  void RunOp(CpuOp& op, ThreadTeam& team);

  const int threads_;
  const CpuDeviceOptions options_;
  FutexWord work_;  // raised by every publish and registration
  std::atomic<bool> stop_{false};
  std::atomic<bool> has_registered_{false};
  Mutex mutex_;
  std::vector<std::shared_ptr<CpuStreamQueue>> registered_ ABSL_GUARDED_BY(mutex_);
  // Executor thread only; by falling priority.
  std::vector<std::shared_ptr<CpuStreamQueue>> queues_;
  size_t next_ = 0;
  struct OpTime {
    const char* name;
    uint64_t calls;
    int64_t ns;
  };
  std::vector<OpTime> profile_;
  std::thread thread_;
};

}  // namespace kvt
