// The device as a seam: memory, streams, events, a host-readable mailbox. Everything is
// asynchronous: operations are enqueued on a stream and none returns a result; results are read
// behind an event or from a mailbox. Backends: kernels/cpu/cpu_device.h, kernels/cuda.
//
// Order. Operations of one stream run in the order they were enqueued. Between streams there is no
// order but the one made by Record and Wait. The CPU device runs one operation at a time: it drains
// all streams by priority, operation by operation, so a high-priority stream overtakes a low one
// at the next operation's end.
//
// Life cycle. Streams, events, mailboxes and buffers are destroyed before their device. Destroying a
// stream waits until it is drained (bounded by its operations). A buffer is released only behind the
// work that may use it: the owner's duty.
//
// Thread-safety. Device: thread-safe. A Stream is enqueued to by one thread at a time. Event and
// Mailbox: recorded, posted by one thread at a time; queried and waited for by any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace kvt {

class Device;
class Ops;

// Device memory, zeroed, 64-byte aligned (2 MiB aligned from 2 MiB on, on huge pages where the CPU
// has them). Move-only; releases on destruction.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device* device, void* data, size_t bytes)
      : device_(device), data_(data), bytes_(bytes) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  // A device address; the host may dereference it only when Device::HostAddressable().
  [[nodiscard]] void* data() const { return data_; }
  template <typename T>
  [[nodiscard]] T* as() const {
    return static_cast<T*>(data_);
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// A point in a stream. Reusable: Query and the waits refer to the latest Record. An event never
// recorded counts as done.
class Event {
 public:
  virtual ~Event() = default;
  [[nodiscard]] virtual bool Query() const = 0;
  // Blocks the calling host thread, asleep, until done or `timeout`; returns whether done. Never
  // called from a device callback.
  [[nodiscard]] virtual bool HostWait(absl::Duration timeout) const = 0;
};

// Small results on their way to the host: `entries` payloads of `entry_bytes`, each with a tag that
// the device publishes after the payload is written (Stream::Post). The owner reuses an entry only
// after it has read it. notify_fd() is an eventfd that becomes readable at every post.
class Mailbox {
 public:
  virtual ~Mailbox() = default;
  [[nodiscard]] virtual int entries() const = 0;
  [[nodiscard]] virtual size_t entry_bytes() const = 0;
  // Host address of the payload (readable once its tag has arrived).
  [[nodiscard]] virtual const void* HostPayload(int entry) const = 0;
  // The same memory as operations on the device address it.
  [[nodiscard]] virtual void* DevicePayload(int entry) = 0;
  // The last tag posted to the entry, 0 before the first; acquires the payload.
  [[nodiscard]] virtual uint64_t Tag(int entry) const = 0;
  // Blocks until Tag(entry) == tag or `timeout`; returns whether it came.
  [[nodiscard]] virtual bool WaitTag(int entry, uint64_t tag, absl::Duration timeout) const = 0;
  [[nodiscard]] virtual int notify_fd() const = 0;
};

// Higher runs first.
enum class StreamPriority : uint8_t { kLow = 0, kNormal = 1, kHigh = 2 };

// Host memory passed to a copy must stay valid until the copy has run, unless said otherwise.
class Stream {
 public:
  virtual ~Stream() = default;
  [[nodiscard]] virtual Device& device() = 0;

  virtual void CopyToDevice(void* dst, const void* host, size_t bytes) = 0;
  virtual void CopyToHost(void* host, const void* src, size_t bytes) = 0;
  virtual void CopyOnDevice(void* dst, const void* src, size_t bytes) = 0;
  // As CopyToDevice, but `host` is read before the call returns; up to kInlineWriteBytesMax.
  virtual void WriteToDevice(void* dst, const void* host, size_t bytes) = 0;
  static constexpr size_t kInlineWriteBytesMax = 64 * 1024;

  virtual void Record(Event& event) = 0;
  // Later operations of this stream wait for the event's latest Record as of this call.
  virtual void Wait(const Event& event) = 0;
  // Runs `callback` on a device thread; later operations wait for it (cudaLaunchHostFunc). It must
  // be short, must not block and must not call the device; it may set flags and signal threads.
  virtual void Callback(std::function<void()> callback) = 0;
  // Publishes `tag` (not 0) for an entry whose payload earlier operations wrote.
  virtual void Post(Mailbox& mailbox, int entry, uint64_t tag) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  // ResourceExhausted when there is no such memory.
  [[nodiscard]] virtual absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Stream> NewStream(StreamPriority priority) = 0;
  [[nodiscard]] virtual std::unique_ptr<Event> NewEvent() = 0;
  [[nodiscard]] virtual absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(int entries,
                                                                            size_t entry_bytes) = 0;
  // The operations of this backend (kernels/ops.h).
  [[nodiscard]] virtual Ops& ops() = 0;
  // "cpu" or "cuda".
  [[nodiscard]] virtual absl::string_view backend() const = 0;
  // Whether the host may read and write device memory in place (the CPU device: yes). Transfers then
  // scatter straight into slots; else they go through CopyToDevice.
  [[nodiscard]] virtual bool HostAddressable() const = 0;
  // OK, or the first asynchronous failure; sticky: the device is of no more use.
  [[nodiscard]] virtual absl::Status Health() const = 0;

 private:
  friend class DeviceBuffer;
  virtual void Free(void* data, size_t bytes) = 0;
};

inline DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) device_->Free(data_, bytes_);
    device_ = other.device_;
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

inline DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) device_->Free(data_, bytes_);
}

}  // namespace kvt
