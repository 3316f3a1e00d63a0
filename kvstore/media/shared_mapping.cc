#include "kvstore/media/shared_mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace kvt {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kReadOnlySeals = kSizeSeals | F_SEAL_FUTURE_WRITE;
// Mappings are whole huge pages, so that the advice can apply to all of them.
constexpr uint64_t kHugePageBytes = 2 * kMiB;
constexpr uint64_t kPageBytes = 4 * kKiB;

uint64_t RoundedSize(uint64_t bytes) {
  return RoundUp(bytes, bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes);
}

// MemAvailable of /proc/meminfo in bytes; zero when it cannot be read.
uint64_t AvailableBytes() {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return 0;
  char line[128];
  unsigned long long kib = 0;
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) break;
  }
  std::fclose(file);
  return kib * kKiB;
}

absl::Status SystemError(absl::string_view name, absl::string_view call, uint64_t bytes,
                         int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat(name, ": ", call, " of ", FormatBytes(bytes), " failed: ", std::strerror(error),
                   "; check the memory limit of the process and its container"));
}

// Huge-page advice and population of fresh pages.
absl::Status Prepare(absl::string_view name, std::byte* data, uint64_t bytes, bool writable,
                     const SharedMappingOptions& options) {
  if (options.huge_pages) (void)madvise(data, bytes, MADV_HUGEPAGE);
  if (!options.populate) return absl::OkStatus();
  if (madvise(data, bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0) {
    return absl::OkStatus();
  }
  if (errno != EINVAL) return SystemError(name, "populating", bytes, errno);
  // A kernel before 5.14: touch every page.
  for (uint64_t at = 0; at < bytes; at += kPageBytes) {
    auto* byte = reinterpret_cast<volatile unsigned char*>(data + at);
    if (writable) {
      *byte = 0;
    } else {
      (void)*byte;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckMemoryAvailable(absl::string_view name, uint64_t bytes) {
  const uint64_t available = AvailableBytes();
  if (available == 0 || bytes <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(name, ": ", FormatBytes(bytes), " of memory asked for, ", FormatBytes(available),
                   " available; configure a smaller pool or free memory"));
}

void UniqueFd::Reset() {
  if (fd_ >= 0) (void)close(std::exchange(fd_, -1));
}

absl::StatusOr<SharedMapping> SharedMapping::Create(absl::string_view name, uint64_t bytes,
                                                    const SharedMappingOptions& options) {
  if (bytes == 0) return absl::InvalidArgumentError(absl::StrCat(name, ": zero bytes asked for"));
  const uint64_t size = RoundedSize(bytes);
  if (options.populate) KVT_RETURN_IF_ERROR(CheckMemoryAvailable(name, size));
  UniqueFd fd(memfd_create(std::string(name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return SystemError(name, "memfd_create", size, errno);
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    return SystemError(name, "ftruncate", size, errno);
  }
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return SystemError(name, "mmap", size, errno);
  SharedMapping mapping(std::move(fd), static_cast<std::byte*>(data), size, true);
  if (fcntl(mapping.fd(), F_ADD_SEALS, options.receiver_writes ? kSizeSeals : kReadOnlySeals) !=
      0) {
    return absl::InternalError(absl::StrCat(name, ": sealing failed: ", std::strerror(errno)));
  }
  KVT_RETURN_IF_ERROR(Prepare(name, mapping.data_, size, true, options));
  return mapping;
}

absl::StatusOr<SharedMapping> SharedMapping::MapReadOnly(UniqueFd fd,
                                                         const SharedMappingOptions& options) {
  return Map(std::move(fd), /*writable=*/false, options);
}

absl::StatusOr<SharedMapping> SharedMapping::MapWritable(UniqueFd fd,
                                                         const SharedMappingOptions& options) {
  return Map(std::move(fd), /*writable=*/true, options);
}

absl::StatusOr<SharedMapping> SharedMapping::Map(UniqueFd fd, bool writable,
                                                 const SharedMappingOptions& options) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  const int needed = writable ? kSizeSeals : kReadOnlySeals;
  if (seals < 0 || (seals & needed) != needed) {
    return absl::PermissionDeniedError(
        "shared mapping: the received descriptor is not a sealed memfd");
  }
  struct stat info;
  if (fstat(fd.get(), &info) != 0 || info.st_size <= 0) {
    return absl::InvalidArgumentError("shared mapping: the received memfd is empty");
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  void* data =
      mmap(nullptr, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return SystemError("shared mapping", "mmap", size, errno);
  SharedMapping mapping(std::move(fd), static_cast<std::byte*>(data), size, writable);
  KVT_RETURN_IF_ERROR(Prepare("shared mapping", mapping.data_, size, writable, options));
  return mapping;
}

SharedMapping::SharedMapping(SharedMapping&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      writable_(other.writable_) {}

SharedMapping& SharedMapping::operator=(SharedMapping&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) (void)munmap(data_, size_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    writable_ = other.writable_;
  }
  return *this;
}

SharedMapping::~SharedMapping() {
  if (data_ != nullptr) (void)munmap(data_, size_);
}

absl::StatusOr<PrivateMapping> PrivateMapping::Create(uint64_t bytes,
                                                      const SharedMappingOptions& options) {
  if (bytes == 0) return absl::InvalidArgumentError("private mapping: zero bytes asked for");
  const uint64_t size = RoundedSize(bytes);
  if (options.populate) KVT_RETURN_IF_ERROR(CheckMemoryAvailable("private mapping", size));
  // Over-allocate by one huge page and trim, so that the start is aligned to one.
  const uint64_t padded = size + kHugePageBytes;
  void* raw = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return SystemError("private mapping", "mmap", size, errno);
  auto* start = static_cast<std::byte*>(raw);
  const uint64_t skip =
      RoundUp(reinterpret_cast<uintptr_t>(raw), kHugePageBytes) - reinterpret_cast<uintptr_t>(raw);
  if (skip > 0) (void)munmap(start, skip);
  (void)munmap(start + skip + size, padded - skip - size);
  PrivateMapping mapping(start + skip, size);
  KVT_RETURN_IF_ERROR(Prepare("private mapping", mapping.data_, size, true, options));
  return mapping;
}

PrivateMapping::PrivateMapping(PrivateMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

PrivateMapping& PrivateMapping::operator=(PrivateMapping&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) (void)munmap(data_, size_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

PrivateMapping::~PrivateMapping() {
  if (data_ != nullptr) (void)munmap(data_, size_);
}

}  // namespace kvt
