#include "kvstore/node/arena_populate.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/mutex.h"
#include "kernels/base/units.h"

namespace kvt {
namespace {

constexpr uint64_t kChunkBytes = 64 * kMiB;
constexpr absl::Duration kTellEvery = absl::Seconds(1);
constexpr absl::Duration kLookEvery = absl::Milliseconds(100);

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

double SecondsPerGib(absl::Duration took, uint64_t bytes) {
  return absl::ToDoubleSeconds(took) * static_cast<double>(kGiB) / static_cast<double>(bytes);
}

std::string ProgressText(uint64_t done, uint64_t all, absl::Duration took) {
  std::string text = absl::StrCat("populating the arena: ", FormatBytes(done), " of ",
                                  FormatBytes(all), ", ", done * 100 / all, " %");
  if (done == 0) return text;
  const absl::Duration left = took * (static_cast<double>(all - done) / static_cast<double>(done));
  absl::StrAppendFormat(&text, ", %.2f s per GiB, about %.0f s more", SecondsPerGib(took, done),
                        absl::ToDoubleSeconds(left));
  return text;
}

}  // namespace

absl::Status PopulateArena(Arena& arena, int threads, const std::function<bool()>& should_stop,
                           const std::function<void(uint64_t)>& progress_to) {
  const absl::Time start = RealClock::Get().Now();
  if (progress_to) progress_to(0);
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
    if (progress_to) progress_to(progress.done.load());
    if (const absl::Time now = RealClock::Get().Now(); now - told >= kTellEvery) {
      told = now;
      KVT_LOG(kInfo, ProgressText(progress.done.load(), arena.size(), now - start));
    }
    MutexLock lock(progress.mu);
    if (progress.running == 0) {
      status.Update(progress.status);
      break;
    }
    progress.changed.WaitFor(progress.mu, kLookEvery);
  }
  for (std::thread& worker : workers) worker.join();
  if (!status.ok()) return status;
  if (progress_to) progress_to(progress.done.load());
  const absl::Duration took = RealClock::Get().Now() - start;
  KVT_LOG(kInfo, "arena of ", FormatBytes(arena.size()), " is populated: ",
          absl::StrFormat("%.2f s, %.2f s per GiB, %d threads", absl::ToDoubleSeconds(took),
                          SecondsPerGib(took, arena.size()), threads));
  return absl::OkStatus();
}

}  // namespace kvt
