#include "kernels/cpu/cpu_device.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/cpu/cpu_executor.h"
#include "kernels/cpu/cpu_mailbox.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/cpu_stream.h"

namespace kvt {
namespace {

constexpr size_t kHugePageBytes = 2 * kMiB;
constexpr size_t kPageBytes = 4 * kKiB;

int PermittedProcessors() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  return std::clamp(CPU_COUNT(&allowed), 1, kTeamThreadsMax);
}

size_t MappedBytes(size_t bytes) {
  return bytes >= kHugePageBytes ? RoundUp(bytes, kHugePageBytes) : RoundUp(bytes, kPageBytes);
}

class CpuDevice final : public Device {
 public:
  explicit CpuDevice(const CpuDeviceOptions& options)
      : executor_(options), ops_(MakeCpuOps(*this, options.threads)) {}

  absl::StatusOr<DeviceBuffer> Allocate(size_t bytes) override;

  std::unique_ptr<Stream> NewStream(StreamPriority priority) override {
    return std::make_unique<CpuStream>(*this, executor_, priority);
  }
  std::unique_ptr<Event> NewEvent() override { return std::make_unique<CpuEvent>(); }
  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(int entries, size_t entry_bytes) override;
  Ops& ops() override { return *ops_; }
  absl::string_view backend() const override { return "cpu"; }
  bool HostAddressable() const override { return true; }
  absl::Status Health() const override { return absl::OkStatus(); }
  std::vector<CpuOpTime> TakeProfile() { return executor_.TakeProfile(); }

 private:
  void Free(void* data, size_t bytes) override { munmap(data, MappedBytes(bytes)); }

  CpuExecutor executor_;
  std::unique_ptr<Ops> ops_;
};

absl::StatusOr<DeviceBuffer> CpuDevice::Allocate(size_t bytes) {
  KVT_CHECK(bytes > 0);
  const size_t mapped = MappedBytes(bytes);
  const bool huge = bytes >= kHugePageBytes;
  // One huge page more, to cut an aligned piece from.
  const size_t asked = huge ? mapped + kHugePageBytes : mapped;
  void* raw = mmap(nullptr, asked, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no ", FormatBytes(bytes), " of device memory: ", std::strerror(errno)));
  }
  uint8_t* data = static_cast<uint8_t*>(raw);
  if (huge) {
    uint8_t* aligned = reinterpret_cast<uint8_t*>(
        RoundUp(reinterpret_cast<uintptr_t>(raw), kHugePageBytes));
    if (aligned > data) munmap(data, static_cast<size_t>(aligned - data));
    uint8_t* end = data + asked;
    if (aligned + mapped < end) {
      munmap(aligned + mapped, static_cast<size_t>(end - aligned - mapped));
    }
    data = aligned;
    madvise(data, mapped, MADV_HUGEPAGE);
    // Touched now, not in the middle of a step. Kernels without it fault in on first use.
    if (madvise(data, mapped, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
      munmap(data, mapped);
      return absl::ResourceExhaustedError(
          absl::StrCat("no ", FormatBytes(bytes), " of device memory"));
    }
  }
  return DeviceBuffer(this, data, bytes);
}

absl::StatusOr<std::unique_ptr<Mailbox>> CpuDevice::NewMailbox(int entries, size_t entry_bytes) {
  KVT_CHECK(entries > 0 && entry_bytes > 0, "entries=", entries, " bytes=", entry_bytes);
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  return std::make_unique<CpuMailbox>(entries, entry_bytes, fd);
}

}  // namespace

std::vector<CpuOpTime> TakeCpuProfile(Device& device) {
  return static_cast<CpuDevice&>(device).TakeProfile();
}

absl::StatusOr<std::unique_ptr<Device>> MakeCpuDevice(const CpuDeviceOptions& options) {
  if (options.threads < 0 || options.threads > kTeamThreadsMax) {
    return absl::InvalidArgumentError(absl::StrCat("threads: ", options.threads,
                                                   " is not in [0, ", kTeamThreadsMax, "]"));
  }
  if (options.spin < absl::ZeroDuration() || options.spin > absl::Milliseconds(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("spin: ", absl::FormatDuration(options.spin), " is not in [0, 1ms]"));
  }
  CpuDeviceOptions chosen = options;
  if (chosen.threads == 0) chosen.threads = PermittedProcessors();
  return std::make_unique<CpuDevice>(chosen);
}

}  // namespace kvt
