#include "tests/support/cuda_emulation/cuda_emulation.h"

#include <ucontext.h>

#include <memory>
#include <vector>

#include "kernels/base/check.h"

namespace kvt::cuda_emulation {

Here here;

namespace {

constexpr size_t kStackBytes = size_t{128} << 10;
constexpr unsigned kThreadsMax = 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<std::byte[]> stack;
  bool has_ended = true;
};

// Those that are to come together. The last one to arrive lets all go.
struct Meeting {
  unsigned members = 0;
  unsigned arrived = 0;
  uint64_t held = 0;

  void OpenIfComplete() {
    if (arrived < members || members == 0) return;
    arrived = 0;
    ++held;
  }
};

struct Warp {
  Meeting meeting;
  // Two, as a lane may give its next value before another has read the last.
  std::array<std::array<uint64_t, kWarp>, 2> values;
};

struct ThreadBlock {
  std::vector<Fiber> fibers = std::vector<Fiber>(kThreadsMax);
  std::array<Warp, kThreadsMax / kWarp> warps;
  Meeting meeting;
  ucontext_t scheduler;
  const std::function<void()>* body = nullptr;
  bool has_moved = false;  // a fiber came on in this round
};
ThreadBlock& Running() {
  static ThreadBlock block;
  return block;
}

void Await(Meeting& meeting) {
  ThreadBlock& block = Running();
  block.has_moved = true;
  const uint64_t held = meeting.held;
  ++meeting.arrived;
  meeting.OpenIfComplete();
  const unsigned thread = here.thread.x;
  while (meeting.held == held) swapcontext(&block.fibers[thread].context, &block.scheduler);
}

void RunFiber() {
  ThreadBlock& block = Running();
  (*block.body)();
  const unsigned thread = here.thread.x;
  block.has_moved = true;
  block.fibers[thread].has_ended = true;
  for (Meeting* meeting : {&block.meeting, &block.warps[thread / kWarp].meeting}) {
    --meeting->members;  // CUDA's barriers do not wait for threads that have ended
    meeting->OpenIfComplete();
  }
  swapcontext(&block.fibers[thread].context, &block.scheduler);
}

void Start(Fiber& fiber) {
  if (fiber.stack == nullptr) fiber.stack = std::make_unique<std::byte[]>(kStackBytes);
  KVT_CHECK(getcontext(&fiber.context) == 0);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &RunFiber, 0);
  fiber.has_ended = false;
}

void RunThreadBlock(unsigned threads) {
  ThreadBlock& block = Running();
  block.meeting = {.members = threads};
  for (unsigned i = 0; i < threads / kWarp; ++i) block.warps[i].meeting = {.members = kWarp};
  for (unsigned i = 0; i < threads; ++i) Start(block.fibers[i]);
  for (bool is_running = true; is_running;) {
    is_running = false;
    block.has_moved = false;
    for (unsigned i = 0; i < threads; ++i) {
      if (block.fibers[i].has_ended) continue;
      is_running = true;
      here.thread = dim3(i, 0, 0);
      swapcontext(&block.scheduler, &block.fibers[i].context);
    }
    KVT_CHECK(!is_running || block.has_moved, "every thread waits");
  }
}

}  // namespace

void Launch(dim3 grid, unsigned threads, const std::function<void()>& body) {
  KVT_CHECK(threads > 0 && threads % kWarp == 0 && threads <= kThreadsMax, "threads=", threads);
  Running().body = &body;
  here.grid = grid;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        here.block = dim3(x, y, z);
        RunThreadBlock(threads);
      }
    }
  }
}

void AwaitThreadBlock() { Await(Running().meeting); }

std::array<uint64_t, kWarp> Exchange(uint64_t mine) {
  Warp& warp = Running().warps[here.thread.x / kWarp];
  std::array<uint64_t, kWarp>& values = warp.values[warp.meeting.held % 2];
  values[Lane()] = mine;
  Await(warp.meeting);
  return values;
}

}  // namespace kvt::cuda_emulation
