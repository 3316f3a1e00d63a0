// The one team of threads that computes. A job runs on every member at once; between jobs the
// members spin for a short, bounded time and then sleep, so that consecutive operations of a step
// cost a few hundred nanoseconds to hand out and an idle team costs nothing. Not OpenMP: its passive
// waiting puts threads to sleep after every region, its active waiting starves processes that share
// processors, and each calling thread gets a team of its own.
//
// Owner: CpuDevice. Run is called by one thread only, which is member 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "kernels/cpu/futex.h"

namespace kvt {

class ThreadTeam;

// What a job sees of the team. Barrier() returns when every member has called it.
class TeamMember {
 public:
  TeamMember(ThreadTeam& team, int index) : team_(team), index_(index) {}
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] int count() const;
  void Barrier();

  // This member's share of `items`, contiguous: [begin, end).
  struct Range {
    int begin;
    int end;
  };
  [[nodiscard]] Range Share(int items) const;

 private:
  ThreadTeam& team_;
  const int index_;
};

class ThreadTeam {
 public:
  using Job = void (*)(const void* context, TeamMember& member);

  // `member_start` runs once on each started member (not on member 0), before its first job.
  ThreadTeam(int threads, bool pin, absl::Duration spin, void (*member_start)(int member));
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Runs job(context, member) on all members; returns when all are done.
  void Run(Job job, const void* context);
  [[nodiscard]] int threads() const { return threads_; }

  // How long members look before they sleep, for waits of the executor (FutexWord).
  [[nodiscard]] uint64_t spin_ticks() const { return spin_ticks_; }

 private:
  friend class TeamMember;
  void MemberMain(int index);
  void Arrive();

  const int threads_;
  const bool pin_;
  const uint64_t spin_ticks_;
  void (*const member_start_)(int);

  // Job hand-out: context and job are written, then round_ is raised.
  alignas(64) FutexWord round_;
  Job job_ = nullptr;
  const void* context_ = nullptr;
  bool stop_ = false;
  // Barrier: arrived_ counts up to threads_, the last one raises phase_.
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) FutexWord phase_;
  std::vector<std::thread> members_;
};

// Binds the calling thread to the index-th processor it may run on.
void PinThisThread(int index);

}  // namespace kvt
