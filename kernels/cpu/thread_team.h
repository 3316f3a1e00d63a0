// The one team of threads that computes. A job is cut into as many parts as the team has members;
// a member that is awake takes its own part, and whoever is done takes a part that nobody has begun.
// So a member that the operating system does not let run (processors shared with other processes)
// holds nothing up, and on a quiet machine each member has the same part, and its weights in its
// cache, every time. Between jobs members look for work for a short, bounded time and then sleep:
// handing out a job costs a few hundred nanoseconds within a step, and an idle team costs nothing.
//
// Not OpenMP: its passive waiting puts threads to sleep after every region, its active waiting
// starves processes that share processors, and each calling thread gets a team of its own.
//
// Owner: CpuExecutor. Run is called by one thread only, which is member 0.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "kernels/cpu/futex.h"

namespace kvt {

// One part of a job. Parts run in any order, on any thread, some perhaps one after the other: a part
// never waits for another.
class TeamMember {
 public:
  TeamMember(int index, int count) : index_(index), count_(count) {}
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] int count() const { return count_; }

  // This part's share of `items`, contiguous: [begin, end).
  struct Range {
    int begin;
    int end;
  };
  [[nodiscard]] Range Share(int items) const;

 private:
  const int index_;
  const int count_;
};

class ThreadTeam {
 public:
  using Job = void (*)(const void* context, TeamMember& member);

  // `member_start` runs once on each started member (not on member 0), before its first part.
  ThreadTeam(int threads, bool pin, absl::Duration spin, void (*member_start)(int member));
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Runs job(context, part) for each of threads() parts; returns when all are done.
  void Run(Job job, const void* context);
  [[nodiscard]] int threads() const { return threads_; }
  // How long members look before they sleep, for waits of the executor (FutexWord).
  [[nodiscard]] uint64_t spin_ticks() const { return spin_ticks_; }

 private:
  // The last round in which the part was taken.
  struct alignas(64) Part {
    std::atomic<uint32_t> round{0};
  };
  void MemberMain(int index);
  // Takes parts of `round` until none is left, the member's own first.
  void TakeParts(int index, uint32_t round);

  const int threads_;
  const bool pin_;
  const uint64_t spin_ticks_;
  void (*const member_start_)(int);

  // Hand-out: job_ and context_ are written, then round_ is raised. They are read only by who has
  // taken a part of the round, which cannot end before that part has: so they never change under a
  // reader, however late it wakes.
  alignas(64) FutexWord round_;
  Job job_ = nullptr;
  const void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  const std::unique_ptr<Part[]> parts_;
  alignas(64) FutexWord finished_;  // parts finished so far, over all rounds
  std::vector<std::thread> members_;
};

// Binds the calling thread to the index-th processor it may run on.
void PinThisThread(int index);

}  // namespace kvt
