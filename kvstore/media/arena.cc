#include "kvstore/media/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvt {
namespace {

constexpr uint64_t kPageBytes = 4 * kKiB;

}  // namespace

absl::StatusOr<Arena> Arena::Create(uint64_t bytes, uint32_t records) {
  KVT_RETURN_IF_ERROR(CheckMemoryAvailable("arena", bytes));
  SharedMappingOptions options;
  options.populate = false;
  KVT_ASSIGN_OR_RETURN(SharedMapping mapping,
                       SharedMapping::Create("kvtide-arena", bytes, options));
  KVT_ASSIGN_OR_RETURN(RecordTable table, RecordTable::Create(records));
  return Arena(std::move(mapping), std::move(table), bytes);
}

absl::Status Arena::Populate(uint64_t offset, uint64_t bytes) {
  KVT_CHECK(offset % kPageBytes == 0 && offset <= bytes_ && bytes <= bytes_ - offset);
  if (madvise(data() + offset, bytes, MADV_POPULATE_WRITE) == 0) return absl::OkStatus();
  if (errno != EINVAL) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "arena: populating ", FormatBytes(bytes), " at ", FormatBytes(offset), " failed: ",
        std::strerror(errno), "; configure a smaller arena_bytes or raise the memory limit"));
  }
  // A kernel before 5.14: touch every page.
  for (uint64_t at = offset; at < offset + bytes; at += kPageBytes) {
    *reinterpret_cast<volatile unsigned char*>(data() + at) = 0;
  }
  return absl::OkStatus();
}

}  // namespace kvt
