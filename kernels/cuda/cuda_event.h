// Event and mailbox of a CUDA device. Both are signalled by host functions of a stream, which may run
// after the object's destruction, so their state is shared.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/device.h"

struct CUevent_st;

namespace kvt {

// Lets host threads sleep until a host function has run.
class CudaSignal {
 public:
  void Notify();
  // Whether done() came true before `timeout`. `done` must be true before Notify is called for it.
  [[nodiscard]] bool WaitUntil(const std::function<bool()>& done, absl::Duration timeout);

 private:
  Mutex mutex_;
  CondVar changed_;
};

struct CudaEventState {
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> done{0};
  CudaSignal signal;
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(CUevent_st* handle) : handle_(handle) {}
  ~CudaEvent() override;
  [[nodiscard]] bool Query() const override;
  [[nodiscard]] bool HostWait(absl::Duration timeout) const override;
  [[nodiscard]] CUevent_st* handle() const { return handle_; }
  [[nodiscard]] const std::shared_ptr<CudaEventState>& state() const { return state_; }

 private:
  CUevent_st* const handle_;
  const std::shared_ptr<CudaEventState> state_ = std::make_shared<CudaEventState>();
};

// Payloads in pinned host memory that the device writes in place.
struct CudaMailboxState {
  CudaMailboxState(int entries, size_t stride, uint8_t* payload, int fd)
      : stride(stride), payload(payload), tags(static_cast<size_t>(entries)), fd(fd) {}
  ~CudaMailboxState();
  void Publish(int entry, uint64_t tag);

  const size_t stride;
  uint8_t* const payload;
  std::vector<std::atomic<uint64_t>> tags;
  const int fd;
  CudaSignal signal;
};

class CudaMailbox final : public Mailbox {
 public:
  CudaMailbox(size_t entry_bytes, std::shared_ptr<CudaMailboxState> state)
      : entry_bytes_(entry_bytes), state_(std::move(state)) {}
  [[nodiscard]] int entries() const override { return static_cast<int>(state_->tags.size()); }
  [[nodiscard]] size_t entry_bytes() const override { return entry_bytes_; }
  [[nodiscard]] const void* HostPayload(int entry) const override { return Payload(entry); }
  // Pinned memory has one address on host and device (unified addressing).
  [[nodiscard]] void* DevicePayload(int entry) override { return Payload(entry); }
  [[nodiscard]] uint64_t Tag(int entry) const override;
  [[nodiscard]] bool WaitTag(int entry, uint64_t tag, absl::Duration timeout) const override;
  [[nodiscard]] int notify_fd() const override { return state_->fd; }
  [[nodiscard]] const std::shared_ptr<CudaMailboxState>& state() const { return state_; }

 private:
  [[nodiscard]] uint8_t* Payload(int entry) const;

  const size_t entry_bytes_;
  const std::shared_ptr<CudaMailboxState> state_;
};

}  // namespace kvt
