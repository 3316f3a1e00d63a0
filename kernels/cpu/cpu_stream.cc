#include "kernels/cpu/cpu_stream.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/cpu_executor.h"
#include "kernels/cpu/cpu_mailbox.h"

namespace kvt {
namespace {

// Copies of at least this many bytes are shared by the team.
constexpr size_t kTeamCopyBytesMin = 256 * 1024;

struct CopyArgs {
  void* dst;
  const void* src;
  size_t bytes;
};

void CopyKernel(const CopyArgs& args, TeamMember& member) {
  const size_t share = (args.bytes / static_cast<size_t>(member.count()) + 63) / 64 * 64;
  const size_t begin = std::min(args.bytes, share * static_cast<size_t>(member.index()));
  const size_t end = member.index() + 1 == member.count() ? args.bytes
                                                         : std::min(args.bytes, begin + share);
  if (begin < end) {
    std::memcpy(static_cast<uint8_t*>(args.dst) + begin,
                static_cast<const uint8_t*>(args.src) + begin, end - begin);
  }
}

}  // namespace

void CpuEventState::Signal(uint64_t record) {
  // Records of one event on several streams may run in any order; the latest counts.
  uint64_t old = done.load(std::memory_order_relaxed);
  while (old < record && !done.compare_exchange_weak(old, record)) {
  }
  if (waiters.load() == 0) return;
  MutexLock lock(mutex);
  changed.NotifyAll();
}

CpuStream::CpuStream(Device& device, CpuExecutor& executor, StreamPriority priority)
    : device_(device),
      executor_(executor),
      queue_(std::make_shared<CpuStreamQueue>(priority)) {
  executor_.Register(queue_);
}

CpuStream::~CpuStream() {
  KVT_CHECK(!executor_.OnExecutorThread(), "a stream was destroyed in a device callback");
  CpuStreamQueue* queue = queue_.get();
  Enqueue("close", [queue](ThreadTeam&) { queue->closed.store(true, std::memory_order_release); });
  const uint64_t last = queue_->tail.load(std::memory_order_relaxed);
  for (uint64_t head; (head = queue_->head.load(std::memory_order_acquire)) != last;) {
    queue_->head.wait(head, std::memory_order_acquire);
  }
}

CpuOp& CpuStream::Reserve() {
  const uint64_t tail = queue_->tail.load(std::memory_order_relaxed);
  for (uint64_t head;
       tail - (head = queue_->head.load(std::memory_order_acquire)) >= kStreamOpsMax;) {
    KVT_CHECK(!executor_.OnExecutorThread(), "a device callback enqueued to a full stream");
    queue_->head.wait(head, std::memory_order_acquire);
  }
  return queue_->ops[tail % kStreamOpsMax];
}

void CpuStream::Publish() {
  queue_->tail.store(queue_->tail.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  executor_.Wake();
}

void CpuStream::CopyOnDevice(void* dst, const void* src, size_t bytes) {
  const CopyArgs args{dst, src, bytes};
  if (bytes >= kTeamCopyBytesMin) {
    EnqueueKernel("copy", &CopyKernel, args);
  } else {
    Enqueue("copy", [args](ThreadTeam&) { std::memcpy(args.dst, args.src, args.bytes); });
  }
}

void CpuStream::CopyToDevice(void* dst, const void* host, size_t bytes) {
  CopyOnDevice(dst, host, bytes);
}

void CpuStream::CopyToHost(void* host, const void* src, size_t bytes) {
  CopyOnDevice(host, src, bytes);
}

void CpuStream::WriteToDevice(void* dst, const void* host, size_t bytes) {
  KVT_CHECK(bytes <= kInlineWriteBytesMax, "bytes=", bytes);
  CpuStreamQueue* queue = queue_.get();
  // A contiguous piece of the ring: the rest of a lap that is too short is skipped.
  uint64_t begin = queue->inline_tail;
  const size_t left = kStreamInlineBytesMax - begin % kStreamInlineBytesMax;
  if (left < bytes) begin += left;
  const uint64_t end = begin + bytes;
  for (uint64_t head; end - (head = queue->inline_head.load(std::memory_order_acquire)) >
                      kStreamInlineBytesMax;) {
    queue->inline_head.wait(head, std::memory_order_acquire);
  }
  uint8_t* piece = queue->inline_bytes.get() + begin % kStreamInlineBytesMax;
  std::memcpy(piece, host, bytes);
  queue->inline_tail = end;
  Enqueue("write", [queue, piece, dst, bytes, end](ThreadTeam&) {
    std::memcpy(dst, piece, bytes);
    queue->inline_head.store(end, std::memory_order_release);
    queue->inline_head.notify_one();
  });
}

void CpuStream::Record(Event& event) {
  std::shared_ptr<CpuEventState> state = static_cast<CpuEvent&>(event).state();
  const uint64_t record = state->recorded.fetch_add(1) + 1;
  Enqueue("record", [state = std::move(state), record](ThreadTeam&) { state->Signal(record); });
}

void CpuStream::Wait(const Event& event) {
  std::shared_ptr<CpuEventState> state = static_cast<const CpuEvent&>(event).state();
  const uint64_t record = state->recorded.load();
  CpuStreamQueue* queue = queue_.get();
  Enqueue("wait", [queue, state = std::move(state), record](ThreadTeam&) {
    queue->blocked_on = state;
    queue->blocked_record = record;
  });
}

void CpuStream::Callback(std::function<void()> callback) {
  Enqueue("callback", [callback = std::move(callback)](ThreadTeam&) { callback(); });
}

void CpuStream::Post(Mailbox& mailbox, int entry, uint64_t tag) {
  KVT_CHECK(tag != 0 && entry >= 0 && entry < mailbox.entries(), "entry=", entry);
  std::shared_ptr<CpuMailboxState> state = static_cast<CpuMailbox&>(mailbox).state();
  Enqueue("post", [state = std::move(state), entry, tag](ThreadTeam&) { state->Publish(entry, tag); });
}

}  // namespace kvt
