// Mailbox and event of the CPU device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/base/mutex.h"
#include "kernels/cpu/cpu_stream.h"
#include "kernels/device.h"

namespace kvt {

class CpuEvent final : public Event {
 public:
  [[nodiscard]] bool Query() const override { return state_->Reached(state_->recorded.load()); }
  [[nodiscard]] bool HostWait(absl::Duration timeout) const override;
  [[nodiscard]] const std::shared_ptr<CpuEventState>& state() const { return state_; }

 private:
  const std::shared_ptr<CpuEventState> state_ = std::make_shared<CpuEventState>();
};

// Shared with the operations that post, as in CpuEventState.
struct CpuMailboxState {
  CpuMailboxState(int entries, size_t entry_bytes, int fd);
  ~CpuMailboxState();
  void Publish(int entry, uint64_t tag);

  const size_t stride;
  uint8_t* const payload;
  std::vector<std::atomic<uint64_t>> tags;
  const int fd;
  std::atomic<int> waiters{0};
  Mutex mutex;
  CondVar changed;
};

class CpuMailbox final : public Mailbox {
 public:
  CpuMailbox(int entries, size_t entry_bytes, int fd)
      : entry_bytes_(entry_bytes),
        state_(std::make_shared<CpuMailboxState>(entries, entry_bytes, fd)) {}

  [[nodiscard]] int entries() const override { return static_cast<int>(state_->tags.size()); }
  [[nodiscard]] size_t entry_bytes() const override { return entry_bytes_; }
  [[nodiscard]] const void* HostPayload(int entry) const override;
  [[nodiscard]] void* DevicePayload(int entry) override;
  [[nodiscard]] uint64_t Tag(int entry) const override;
  [[nodiscard]] bool WaitTag(int entry, uint64_t tag, absl::Duration timeout) const override;
  [[nodiscard]] int notify_fd() const override { return state_->fd; }
  [[nodiscard]] const std::shared_ptr<CpuMailboxState>& state() const { return state_; }

 private:
  const size_t entry_bytes_;
  const std::shared_ptr<CpuMailboxState> state_;
};

}  // namespace kvt
