#include "kernels/cuda/cuda_event.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"

namespace kvt {

void CudaSignal::Notify() {
  MutexLock lock(mutex_);
  changed_.NotifyAll();
}

bool CudaSignal::WaitUntil(const std::function<bool()>& done, absl::Duration timeout) {
  const absl::Time deadline = RealClock::Get().Now() + timeout;
  MutexLock lock(mutex_);
  while (!done()) {
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) return false;
    changed_.WaitFor(mutex_, left);
  }
  return true;
}

CudaEvent::~CudaEvent() { cudaEventDestroy(handle_); }

bool CudaEvent::Query() const {
  const uint64_t recorded = state_->recorded.load();
  return state_->done.load() >= recorded || cudaEventQuery(handle_) == cudaSuccess;
}

bool CudaEvent::HostWait(absl::Duration timeout) const {
  const uint64_t recorded = state_->recorded.load();
  return state_->signal.WaitUntil([&] { return state_->done.load() >= recorded; }, timeout);
}

CudaMailboxState::~CudaMailboxState() {
  cudaFreeHost(payload);
  close(fd);
}

void CudaMailboxState::Publish(int entry, uint64_t tag) {
  tags[static_cast<size_t>(entry)].store(tag);
  const uint64_t one = 1;
  // Fails only when the counter is full, and then the descriptor is readable anyway.
  [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof(one));
  signal.Notify();
}

uint8_t* CudaMailbox::Payload(int entry) const {
  KVT_CHECK(entry >= 0 && entry < entries(), "entry=", entry);
  return state_->payload + state_->stride * static_cast<size_t>(entry);
}

uint64_t CudaMailbox::Tag(int entry) const {
  KVT_CHECK(entry >= 0 && entry < entries(), "entry=", entry);
  return state_->tags[static_cast<size_t>(entry)].load(std::memory_order_acquire);
}

bool CudaMailbox::WaitTag(int entry, uint64_t tag, absl::Duration timeout) const {
  return state_->signal.WaitUntil([&] { return Tag(entry) == tag; }, timeout);
}

}  // namespace kvt
