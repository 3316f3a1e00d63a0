#include "kvstore/node/arena_populate.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/base/units.h"

namespace kvt {
namespace {

constexpr uint64_t kChunkBytes = 64 * kMiB;

struct Progress {
  std::atomic<uint64_t> next{0};  // offset of the next chunk
  std::atomic<uint64_t> done{0};  // bytes
  Mutex mu;
  CondVar changed;
  absl::Status status ABSL_GUARDED_BY(mu);
  int running ABSL_GUARDED_BY(mu) = 0;
};

void PopulateChunks(Arena& arena, Progress& progress) {
  absl::Status status;
  while (status.ok()) {
    const uint64_t offset = progress.next.fetch_add(kChunkBytes);
    if (offset >= arena.size()) break;
    const uint64_t bytes = std::min(kChunkBytes, arena.size() - offset);
    status = arena.Populate(offset, bytes);
    progress.done.fetch_add(bytes);
  }
  MutexLock lock(progress.mu);
  progress.status.Update(status);
  --progress.running;
  progress.changed.NotifyAll();
}

}  // namespace

absl::Status PopulateArena(Arena& arena, int threads, const std::function<bool()>& should_stop) {
  const absl::Time start = RealClock::Get().Now();
  Progress progress;
  std::vector<std::thread> workers;
  {
    MutexLock lock(progress.mu);
    progress.running = threads;
  }
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&] { PopulateChunks(arena, progress); });
  }
  absl::Status status;
  absl::Time told = start;
  while (true) {
    if (should_stop()) {
      progress.next.store(arena.size());
      status = absl::CancelledError("populating the arena was stopped");
    }
    if (const absl::Time now = RealClock::Get().Now(); now - told >= absl::Seconds(1)) {
      told = now;
      KVT_LOG(kInfo, "populating the arena: ", FormatBytes(progress.done.load()), " of ",
              FormatBytes(arena.size()));
    }
    MutexLock lock(progress.mu);
    if (progress.running == 0) {
      status.Update(progress.status);
      break;
    }
    progress.changed.WaitFor(progress.mu, absl::Milliseconds(500));
  }
  for (std::thread& worker : workers) worker.join();
  if (!status.ok()) return status;
  const double seconds = absl::ToDoubleSeconds(RealClock::Get().Now() - start);
  KVT_LOG(kInfo, "arena of ", FormatBytes(arena.size()), " is populated: ",
          absl::StrFormat("%.2f s, %.2f s per GiB, %d threads", seconds,
                          seconds * static_cast<double>(kGiB) / static_cast<double>(arena.size()),
                          threads));
  return absl::OkStatus();
}

}  // namespace kvt
