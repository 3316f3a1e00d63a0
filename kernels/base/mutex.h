// Annotated wrappers of std::mutex and std::condition_variable. absl::Mutex is not used: Debian's
// library is not instrumented, so ThreadSanitizer would report false races.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"

namespace kvt {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mu_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mu_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mu_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) { mu_.Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mu_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mu_;
};

// Every wait has a deadline: there is no Wait without one.
class CondVar {
 public:
  // Returns false when `timeout` passed before a signal. The caller holds `mu` and checks its
  // condition again in either case.
  bool WaitFor(Mutex& mu, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::unique_lock<std::mutex> lock(mu.mu_, std::adopt_lock);
    // system_clock keeps ThreadSanitizer's interceptor (pthread_cond_timedwait) in play; waits here
    // are re-checked loops, so a stepped calendar only causes an early or late re-check.
    const bool signalled =
        cv_.wait_until(lock, std::chrono::system_clock::now() +
                                 absl::ToChronoMicroseconds(timeout)) == std::cv_status::no_timeout;
    lock.release();
    return signalled;
  }
  void NotifyOne() { cv_.notify_one(); }
  void NotifyAll() { cv_.notify_all(); }

 private:
  std::condition_variable cv_;
};

}  // namespace kvt
