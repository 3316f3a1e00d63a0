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

int TeamMember::count() const { return team_.threads(); }

void TeamMember::Barrier() { team_.Arrive(); }

TeamMember::Range TeamMember::Share(int items) const {
  const int64_t n = items;
  return {static_cast<int>(n * index_ / count()), static_cast<int>(n * (index_ + 1) / count())};
}

ThreadTeam::ThreadTeam(int threads, bool pin, absl::Duration spin, void (*member_start)(int))
    : threads_(threads),
      pin_(pin),
      spin_ticks_(static_cast<uint64_t>(absl::ToDoubleNanoseconds(spin) * TicksPerNanosecond())),
      member_start_(member_start) {
  KVT_CHECK(threads >= 1, threads);
  for (int i = 1; i < threads; ++i) members_.emplace_back([this, i] { MemberMain(i); });
}

ThreadTeam::~ThreadTeam() {
  stop_ = true;
  round_.Raise();
  for (std::thread& member : members_) member.join();
}

void ThreadTeam::MemberMain(int index) {
  if (pin_) PinThisThread(index);
  if (member_start_ != nullptr) member_start_(index);
  TeamMember member(*this, index);
  for (uint32_t seen = 0;; ++seen) {
    round_.WaitWhile(seen, spin_ticks_);
    if (stop_) return;
    job_(context_, member);
    Arrive();
  }
}

void ThreadTeam::Run(Job job, const void* context) {
  job_ = job;
  context_ = context;
  if (threads_ > 1) round_.Raise();
  TeamMember member(*this, 0);
  job(context, member);
  Arrive();
}

void ThreadTeam::Arrive() {
  if (threads_ == 1) return;
  const uint32_t phase = phase_.Value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.Raise();
    return;
  }
  phase_.WaitWhile(phase, spin_ticks_);
}

}  // namespace kvt
