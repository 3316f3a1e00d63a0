// Internals of the CPU device shared by its files: streams as bounded rings of operations, and how
// operations get there. The executor (CpuExecutor) is the one consumer of every ring.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/mutex.h"
#include "kernels/cpu/thread_team.h"
#include "kernels/device.h"

namespace kvt {

class CpuExecutor;

// Operations that may wait in one stream; an enqueuer beyond it waits for the device. A step of the
// deepest model (256 layers) takes about 12 operations a layer.
inline constexpr uint32_t kStreamOpsMax = 4096;
// Bytes of WriteToDevice that may be in flight in one stream.
inline constexpr size_t kStreamInlineBytesMax = 1024 * 1024;
static_assert(kStreamInlineBytesMax >= 4 * Stream::kInlineWriteBytesMax);

// One enqueued operation: a callable in place, no allocation.
class CpuOp {
 public:
  static constexpr size_t kBytesMax = 176;

  template <typename F>
  void Set(F&& function) {
    using T = std::decay_t<F>;
    static_assert(sizeof(T) <= kBytesMax && alignof(T) <= 16);
    new (storage_.data()) T(std::forward<F>(function));
    run_ = [](void* self, ThreadTeam& team) { (*static_cast<T*>(self))(team); };
    destroy_ = [](void* self) { static_cast<T*>(self)->~T(); };
  }
  void Run(ThreadTeam& team) { run_(storage_.data(), team); }
  void Destroy() { destroy_(storage_.data()); }
  // Kind of operation, for profiles; a string literal.
  void set_name(const char* name) { name_ = name; }
  [[nodiscard]] const char* name() const { return name_; }

 private:
  void (*run_)(void*, ThreadTeam&) = nullptr;
  void (*destroy_)(void*) = nullptr;
  const char* name_ = "";
  alignas(16) std::array<std::byte, kBytesMax> storage_;
};

// Shared by an event and the operations that mention it, so that the event may be destroyed as soon
// as a waiter has seen it done. Records are numbered; `done` is the last one that ran.
struct CpuEventState {
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> done{0};
  std::atomic<int> waiters{0};
  Mutex mutex;
  CondVar changed;

  [[nodiscard]] bool Reached(uint64_t record) const {
    return done.load(std::memory_order_acquire) >= record;
  }
  void Signal(uint64_t record);
};

// Ring contents: single producer (the enqueuing thread), single consumer (the executor). The
// executor keeps it alive through a shared pointer until it has dropped it.
struct CpuStreamQueue {
  explicit CpuStreamQueue(StreamPriority p) : priority(p), ops(kStreamOpsMax) {}

  const StreamPriority priority;
  std::vector<CpuOp> ops;
  std::atomic<uint64_t> tail{0};  // enqueued
  std::atomic<uint64_t> head{0};  // finished
  // Waits that the executor has met and not seen fulfilled (executor only).
  std::shared_ptr<CpuEventState> blocked_on;
  uint64_t blocked_record = 0;
  std::unique_ptr<uint8_t[]> inline_bytes{new uint8_t[kStreamInlineBytesMax]};
  uint64_t inline_tail = 0;              // producer
  std::atomic<uint64_t> inline_head{0};  // consumer
  std::atomic<bool> closed{false};       // set by the last operation of the stream

  [[nodiscard]] bool Empty() const {
    return head.load(std::memory_order_acquire) == tail.load(std::memory_order_acquire);
  }
};

class CpuStream final : public Stream {
 public:
  CpuStream(Device& device, CpuExecutor& executor, StreamPriority priority);
  ~CpuStream() override;

  [[nodiscard]] Device& device() override { return device_; }
  void CopyToDevice(void* dst, const void* host, size_t bytes) override;
  void CopyToHost(void* host, const void* src, size_t bytes) override;
  void CopyOnDevice(void* dst, const void* src, size_t bytes) override;
  void WriteToDevice(void* dst, const void* host, size_t bytes) override;
  void Record(Event& event) override;
  void Wait(const Event& event) override;
  void Callback(std::function<void()> callback) override;
  void Post(Mailbox& mailbox, int entry, uint64_t tag) override;

  // Enqueues `function(ThreadTeam&)`, run by the executor thread. `name` is a literal.
  template <typename F>
  void Enqueue(const char* name, F&& function) {
    CpuOp& op = Reserve();
    op.set_name(name);
    op.Set(std::forward<F>(function));
    Publish();
  }

  // Enqueues a kernel: `kernel(args, member)` on every member of the team.
  template <typename Args>
  void EnqueueKernel(const char* name, void (*kernel)(const Args&, TeamMember&),
                     const Args& args) {
    static_assert(std::is_trivially_copyable_v<Args>);
    struct Call {
      void (*kernel)(const Args&, TeamMember&);
      Args args;
    };
    Enqueue(name, [call = Call{kernel, args}](ThreadTeam& team) {
      team.Run(
          [](const void* context, TeamMember& member) {
            const Call& c = *static_cast<const Call*>(context);
            c.kernel(c.args, member);
          },
          &call);
    });
  }

 private:
  CpuOp& Reserve();
  void Publish();

  Device& device_;
  CpuExecutor& executor_;
  const std::shared_ptr<CpuStreamQueue> queue_;
};

}  // namespace kvt
