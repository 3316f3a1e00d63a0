#include "kernels/cuda/cuda_device.h"

#include <cuda_runtime.h>
#include <sys/eventfd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/mutex.h"
#include "kernels/base/units.h"
#include "kernels/cuda/cuda_event.h"

namespace kvt {
namespace {

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index) : index_(index) {}

  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) override;
  std::unique_ptr<Stream> NewStream(StreamPriority priority) override;
  std::unique_ptr<Event> NewEvent() override;
  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(int entries, size_t entry_bytes) override;
  Ops& ops() override {
    KVT_CHECK(false, "the CUDA backend has no operations of the model yet");
    __builtin_unreachable();
  }
  absl::string_view backend() const override { return "cuda"; }
  bool HostAddressable() const override { return false; }
  absl::Status Health() const override {
    MutexLock lock(mutex_);
    return health_;
  }

  // The current device is a property of the calling thread.
  void Use() { Check(cudaSetDevice(index_), "cudaSetDevice"); }
  // Keeps the first failure.
  void Check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    MutexLock lock(mutex_);
    if (health_.ok()) {
      health_ = absl::InternalError(absl::StrCat("cuda device ", index_, ": ", what, ": ",
                                                 cudaGetErrorString(error)));
    }
  }

 private:
  void Free(void* data, size_t) override {
    Use();
    Check(cudaFree(data), "cudaFree");
  }

  const int index_;
  mutable Mutex mutex_;
  absl::Status health_ ABSL_GUARDED_BY(mutex_);
};

class CudaStream final : public Stream {
 public:
  CudaStream(CudaDevice& device, cudaStream_t handle) : device_(device), handle_(handle) {
    for (InlineWrite& write : inline_writes_) {
      device_.Check(cudaHostAlloc(&write.memory, kInlineWriteBytesMax, cudaHostAllocDefault),
                    "cudaHostAlloc");
      device_.Check(cudaEventCreateWithFlags(&write.read, cudaEventDisableTiming),
                    "cudaEventCreateWithFlags");
    }
  }
  ~CudaStream() override {
    device_.Use();
    device_.Check(cudaStreamSynchronize(handle_), "cudaStreamSynchronize");
    for (InlineWrite& write : inline_writes_) {
      cudaEventDestroy(write.read);
      cudaFreeHost(write.memory);
    }
    cudaStreamDestroy(handle_);
  }

  Device& device() override { return device_; }
  void CopyToDevice(void* dst, const void* host, size_t bytes) override {
    Copy(dst, host, bytes, cudaMemcpyHostToDevice);
  }
  void CopyToHost(void* host, const void* src, size_t bytes) override {
    Copy(host, src, bytes, cudaMemcpyDeviceToHost);
  }
  void CopyOnDevice(void* dst, const void* src, size_t bytes) override {
    Copy(dst, src, bytes, cudaMemcpyDeviceToDevice);
  }
  void WriteToDevice(void* dst, const void* host, size_t bytes) override;
  void Record(Event& event) override;
  void Wait(const Event& event) override {
    device_.Use();
    device_.Check(cudaStreamWaitEvent(handle_, dynamic_cast<const CudaEvent&>(event).handle(), 0),
                  "cudaStreamWaitEvent");
  }
  void Callback(std::function<void()> callback) override;
  void Post(Mailbox& mailbox, int entry, uint64_t tag) override {
    KVT_CHECK(tag != 0 && entry >= 0 && entry < mailbox.entries(), "entry=", entry, " tag=", tag);
    Callback([state = dynamic_cast<CudaMailbox&>(mailbox).state(), entry, tag] {
      state->Publish(entry, tag);
    });
  }

  [[nodiscard]] cudaStream_t handle() const { return handle_; }

 private:
  // Pinned memory that holds what WriteToDevice was given until the device has read it.
  struct InlineWrite {
    void* memory = nullptr;
    cudaEvent_t read = nullptr;
  };

  void Copy(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind) {
    device_.Use();
    device_.Check(cudaMemcpyAsync(dst, src, bytes, kind, handle_), "cudaMemcpyAsync");
  }

  CudaDevice& device_;
  const cudaStream_t handle_;
  std::array<InlineWrite, 4> inline_writes_;
  size_t next_inline_write_ = 0;
};

void CudaStream::WriteToDevice(void* dst, const void* host, size_t bytes) {
  KVT_CHECK(bytes <= kInlineWriteBytesMax, "bytes=", bytes);
  InlineWrite& write = inline_writes_[next_inline_write_++ % inline_writes_.size()];
  device_.Use();
  // Waits, asleep or not by the driver's choice, only when this many writes are in flight; bounded by
  // the operations before them.
  device_.Check(cudaEventSynchronize(write.read), "cudaEventSynchronize");
  std::memcpy(write.memory, host, bytes);
  Copy(dst, write.memory, bytes, cudaMemcpyHostToDevice);
  device_.Check(cudaEventRecord(write.read, handle_), "cudaEventRecord");
}

void CudaStream::Record(Event& event) {
  auto& cuda_event = dynamic_cast<CudaEvent&>(event);
  const std::shared_ptr<CudaEventState>& state = cuda_event.state();
  const uint64_t record = state->recorded.fetch_add(1) + 1;
  device_.Use();
  device_.Check(cudaEventRecord(cuda_event.handle(), handle_), "cudaEventRecord");
  Callback([state, record] {
    state->done.store(record);
    state->signal.Notify();
  });
}

void CudaStream::Callback(std::function<void()> callback) {
  auto* owned = new std::function<void()>(std::move(callback));
  device_.Use();
  const cudaError_t error = cudaLaunchHostFunc(
      handle_,
      [](void* data) {
        const std::unique_ptr<std::function<void()>> run(static_cast<std::function<void()>*>(data));
        (*run)();
      },
      owned);
  if (error != cudaSuccess) delete owned;
  device_.Check(error, "cudaLaunchHostFunc");
}

absl::StatusOr<DeviceBuffer> CudaDevice::Allocate(size_t bytes) {
  KVT_CHECK(bytes > 0);
  Use();
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky
    return absl::ResourceExhaustedError(
        absl::StrCat("no ", FormatBytes(bytes), " of memory on cuda device ", index_));
  }
  if (error != cudaSuccess) {
    Check(error, "cudaMalloc");
    return Health();
  }
  DeviceBuffer buffer(this, data, bytes);
  Check(cudaMemset(data, 0, bytes), "cudaMemset");
  Check(cudaDeviceSynchronize(), "cudaMemset");
  return buffer;
}

std::unique_ptr<Stream> CudaDevice::NewStream(StreamPriority priority) {
  Use();
  int least = 0;
  int greatest = 0;  // numerically lower
  Check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  int value = least;
  switch (priority) {
    case StreamPriority::kLow: break;
    case StreamPriority::kNormal: value = (least + greatest) / 2; break;
    case StreamPriority::kHigh: value = greatest; break;
  }
  cudaStream_t handle = nullptr;
  Check(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, value),
        "cudaStreamCreateWithPriority");
  return std::make_unique<CudaStream>(*this, handle);
}

std::unique_ptr<Event> CudaDevice::NewEvent() {
  Use();
  cudaEvent_t handle = nullptr;
  Check(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return std::make_unique<CudaEvent>(handle);
}

absl::StatusOr<std::unique_ptr<Mailbox>> CudaDevice::NewMailbox(int entries, size_t entry_bytes) {
  KVT_CHECK(entries > 0 && entry_bytes > 0, "entries=", entries, " bytes=", entry_bytes);
  Use();
  const size_t stride = RoundUp(entry_bytes, 64);
  void* payload = nullptr;
  const cudaError_t error = cudaHostAlloc(&payload, stride * static_cast<size_t>(entries),
                                          cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return absl::ResourceExhaustedError(
        absl::StrCat("pinned memory for a mailbox: ", cudaGetErrorString(error)));
  }
  std::memset(payload, 0, stride * static_cast<size_t>(entries));
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) {
    const int cause = errno;
    cudaFreeHost(payload);
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(cause)));
  }
  return std::make_unique<CudaMailbox>(
      entry_bytes, std::make_shared<CudaMailboxState>(entries, stride,
                                                      static_cast<uint8_t*>(payload), fd));
}

}  // namespace

int CudaDeviceCount(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    if (why != nullptr) *why = cudaGetErrorString(error);
    return 0;
  }
  if (count == 0 && why != nullptr) *why = "the driver lists no device";
  return count;
}

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int index) {
  std::string why = "no such index";
  const int count = CudaDeviceCount(&why);
  if (index < 0 || index >= count) {
    return absl::NotFoundError(absl::StrCat("cuda device ", index, " of ", count, ": ", why));
  }
  auto device = std::make_unique<CudaDevice>(index);
  device->Use();
  if (const absl::Status health = device->Health(); !health.ok()) return health;
  return device;
}

CUstream_st* CudaStreamHandle(Stream& stream) {
  return dynamic_cast<CudaStream&>(stream).handle();
}

}  // namespace kvt
