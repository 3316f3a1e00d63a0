// A 32-bit word to spin on and then sleep on. std::atomic::wait yields the processor before it
// sleeps, which beside busy processes costs a whole time slice at every hand-over of work.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace kvt {

// Thread-safe. Value(), Raise() by any thread; changes wake every sleeper.
class FutexWord {
 public:
  [[nodiscard]] uint32_t Value() const { return word_.load(std::memory_order_acquire); }

  // Adds one and wakes those who sleep. The order of the two atomics is sequentially consistent:
  // either the sleeper is seen here, or the sleeper sees the new value.
  void Raise() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Returns when the value is not `old`: looks for `spin_ticks` of the time-stamp counter, then
  // sleeps. Whoever raises is a thread of the same owner that ends only after this one.
  void WaitWhile(uint32_t old, uint64_t spin_ticks) {
    const uint64_t start = __rdtsc();
    do {
      if (Value() != old) return;
      _mm_pause();
    } while (__rdtsc() - start < spin_ticks);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word_.load(std::memory_order_seq_cst) == old) {
      syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};
static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

}  // namespace kvt
