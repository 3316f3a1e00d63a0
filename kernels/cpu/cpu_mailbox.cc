#include "kernels/cpu/cpu_mailbox.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/units.h"

namespace kvt {
namespace {

// Waits on `changed` until `done()` or `timeout`. The signaller publishes first and then looks for
// waiters; the waiter announces itself first and then looks: one of the two sees the other.
template <typename Done>
bool WaitUntilDone(std::atomic<int>& waiters, Mutex& mutex, CondVar& changed,
                   absl::Duration timeout, Done done) {
  if (done()) return true;
  const absl::Time deadline = RealClock::Get().Now() + timeout;
  waiters.fetch_add(1);
  bool is_done;
  {
    MutexLock lock(mutex);
    while (!(is_done = done())) {
      const absl::Duration left = deadline - RealClock::Get().Now();
      if (left <= absl::ZeroDuration()) break;
      changed.WaitFor(mutex, left);
    }
  }
  waiters.fetch_sub(1);
  return is_done;
}

}  // namespace

bool CpuEvent::HostWait(absl::Duration timeout) const {
  const uint64_t record = state_->recorded.load();
  return WaitUntilDone(state_->waiters, state_->mutex, state_->changed, timeout,
                       [&] { return state_->done.load() >= record; });
}

CpuMailboxState::CpuMailboxState(int entries, size_t entry_bytes, int notify_fd)
    : stride(RoundUp(entry_bytes, 64)),
      payload(static_cast<uint8_t*>(std::aligned_alloc(64, stride * static_cast<size_t>(entries)))),
      tags(static_cast<size_t>(entries)),
      fd(notify_fd) {
  KVT_CHECK(payload != nullptr, "entries=", entries, " bytes=", entry_bytes);
  std::memset(payload, 0, stride * static_cast<size_t>(entries));
}

CpuMailboxState::~CpuMailboxState() {
  std::free(payload);
  close(fd);
}

void CpuMailboxState::Publish(int entry, uint64_t tag) {
  tags[static_cast<size_t>(entry)].store(tag);
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the descriptor is readable anyway.
  [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof(one));
  if (waiters.load() == 0) return;
  MutexLock lock(mutex);
  changed.NotifyAll();
}

const void* CpuMailbox::HostPayload(int entry) const {
  KVT_CHECK(entry >= 0 && entry < entries(), "entry=", entry);
  return state_->payload + state_->stride * static_cast<size_t>(entry);
}

void* CpuMailbox::DevicePayload(int entry) {
  KVT_CHECK(entry >= 0 && entry < entries(), "entry=", entry);
  return state_->payload + state_->stride * static_cast<size_t>(entry);
}

uint64_t CpuMailbox::Tag(int entry) const {
  KVT_CHECK(entry >= 0 && entry < entries(), "entry=", entry);
  return state_->tags[static_cast<size_t>(entry)].load(std::memory_order_acquire);
}

bool CpuMailbox::WaitTag(int entry, uint64_t tag, absl::Duration timeout) const {
  KVT_CHECK(entry >= 0 && entry < entries(), "entry=", entry);
  return WaitUntilDone(state_->waiters, state_->mutex, state_->changed, timeout,
                       [&] { return state_->tags[static_cast<size_t>(entry)].load() == tag; });
}

}  // namespace kvt
