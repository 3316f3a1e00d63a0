// Memory shared between a store and the workers of its host: a sealed memfd that the store writes
// and workers map read-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvt {

// Owns a file descriptor. Not thread-safe.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { Reset(); }
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool valid() const { return fd_ >= 0; }
  void Reset();

 private:
  int fd_ = -1;
};

struct SharedMappingOptions {
  // Populate all pages at once, so that the first touch costs nothing later (about 0.1 s per 2 GiB
  // once the pages exist).
  bool populate = true;
  // Advise huge pages where the kernel allows them for shared memory; never an error.
  bool huge_pages = true;
  // Create: the receiver may write too (a ring between two processes). Its size is fixed all the
  // same.
  bool receiver_writes = false;
};

// ResourceExhausted naming `name`, both sizes and the remedy when the kernel says that so much memory
// is not available. Create asks it by itself when it populates.
absl::Status CheckMemoryAvailable(absl::string_view name, uint64_t bytes);

// One mapping. Movable; unmaps and closes at its end. The bytes' synchronisation is the owner's.
class SharedMapping {
 public:
  // A new memfd of `bytes` (rounded up to pages), mapped writable here, then sealed: nobody can map
  // it writable again, shrink or grow it. ResourceExhausted with the size, what is free, and the
  // remedy; InvalidArgument for zero bytes.
  static absl::StatusOr<SharedMapping> Create(absl::string_view name, uint64_t bytes,
                                              const SharedMappingOptions& options);
  // A received memfd, mapped read-only. PermissionDenied when it is not sealed as above (its size
  // could change under the reader).
  static absl::StatusOr<SharedMapping> MapReadOnly(UniqueFd fd,
                                                   const SharedMappingOptions& options);

  // A received memfd of receiver_writes, mapped writable. PermissionDenied when its size is not
  // sealed.
  static absl::StatusOr<SharedMapping> MapWritable(UniqueFd fd,
                                                   const SharedMappingOptions& options);

  SharedMapping(SharedMapping&& other) noexcept;
  SharedMapping& operator=(SharedMapping&& other) noexcept;
  ~SharedMapping();

  [[nodiscard]] const std::byte* data() const { return data_; }
  // Null when mapped read-only.
  [[nodiscard]] std::byte* mutable_data() const { return writable_ ? data_ : nullptr; }
  [[nodiscard]] uint64_t size() const { return size_; }
  [[nodiscard]] bool writable() const { return writable_; }
  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  SharedMapping(UniqueFd fd, std::byte* data, uint64_t size, bool writable)
      : fd_(std::move(fd)), data_(data), size_(size), writable_(writable) {}

  static absl::StatusOr<SharedMapping> Map(UniqueFd fd, bool writable,
                                           const SharedMappingOptions& options);

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  bool writable_ = false;
};

// Anonymous private memory for slots and staging, populated, huge pages advised. Same errors.
class PrivateMapping {
 public:
  static absl::StatusOr<PrivateMapping> Create(uint64_t bytes, const SharedMappingOptions& options);
  PrivateMapping(PrivateMapping&& other) noexcept;
  PrivateMapping& operator=(PrivateMapping&& other) noexcept;
  ~PrivateMapping();
  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] uint64_t size() const { return size_; }

 private:
  PrivateMapping(std::byte* data, uint64_t size) : data_(data), size_(size) {}
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace kvt
