#include "kernels/cpu/thread_team.h"

#include <pthread.h>
#include <sched.h>
#include <x86intrin.h>

#include <chrono>

#include "kernels/base/check.h"

namespace kvt {
namespace {

// Time-stamp ticks per nanosecond, measured once over half a millisecond.
double TicksPerNanosecond() {
  static const double ratio = [] {
    const auto start = std::chrono::steady_clock::now();
    const uint64_t ticks = __rdtsc();
    while (std::chrono::steady_clock::now() - start < std::chrono::microseconds(500)) {
    }
    const double ns = std::chrono::duration<double, std::nano>(
                          std::chrono::steady_clock::now() - start).count();
    return static_cast<double>(__rdtsc() - ticks) / ns;
  }();
  return ratio;
}

}  // namespace

void PinThisThread(int index) {
  cpu_set_t allowed;
  KVT_CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
  const int count = CPU_COUNT(&allowed);
  int wanted = index % count;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    if (wanted-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    // A processor that has just gone offline leaves the thread unbound, which is only slower.
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
    return;
  }
}

TeamMember::Range TeamMember::Share(int items) const {
  const int64_t n = items;
  return {static_cast<int>(n * index_ / count_), static_cast<int>(n * (index_ + 1) / count_)};
}

ThreadTeam::ThreadTeam(int threads, bool pin, absl::Duration spin, void (*member_start)(int))
    : threads_(threads),
      pin_(pin),
      spin_ticks_(static_cast<uint64_t>(absl::ToDoubleNanoseconds(spin) * TicksPerNanosecond())),
      member_start_(member_start),
      parts_(new Part[static_cast<size_t>(threads)]) {
  KVT_CHECK(threads >= 1, threads);
  for (int i = 1; i < threads; ++i) members_.emplace_back([this, i] { MemberMain(i); });
}

ThreadTeam::~ThreadTeam() {
  stop_.store(true, std::memory_order_release);
  round_.Raise();
  for (std::thread& member : members_) member.join();
}

void ThreadTeam::MemberMain(int index) {
  if (pin_) PinThisThread(index);
  if (member_start_ != nullptr) member_start_(index);
  for (uint32_t seen = 0;;) {
    round_.WaitWhile(seen, spin_ticks_);
    seen = round_.Value();
    if (stop_.load(std::memory_order_acquire)) return;
    TakeParts(index, seen);
  }
}

void ThreadTeam::Run(Job job, const void* context) {
  if (threads_ == 1) {
    TeamMember all(0, 1);
    job(context, all);
    return;
  }
  job_ = job;
  context_ = context;
  const uint32_t target = finished_.Value() + static_cast<uint32_t>(threads_);
  round_.Raise();
  TakeParts(0, round_.Value());
  for (uint32_t value; (value = finished_.Value()) != target;) {
    finished_.WaitWhile(value, spin_ticks_);
  }
}

void ThreadTeam::TakeParts(int index, uint32_t round) {
  for (int i = 0; i < threads_; ++i) {
    const int part = index + i < threads_ ? index + i : index + i - threads_;
    std::atomic<uint32_t>& taken = parts_[static_cast<size_t>(part)].round;
    uint32_t before = round - 1;
    if (!taken.compare_exchange_strong(before, round, std::memory_order_acq_rel)) continue;
    TeamMember member(part, threads_);
    job_(context_, member);
    finished_.Raise();
  }
}

}  // namespace kvt
