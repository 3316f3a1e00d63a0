#include "kvstore/node/disk_probe.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "absl/strings/str_cat.h"
#include "kernels/base/clock.h"
#include "kernels/base/units.h"
#include "kvstore/media/shared_mapping.h"

namespace kvt {
namespace {

constexpr uint64_t kChunkBytes = 4 * kMiB;
constexpr int kChunks = 16;
constexpr absl::Duration kMeasureFor = absl::Milliseconds(500);
constexpr double kNvmeBytesPerSecond = 1.5e9;
constexpr double kSsdBytesPerSecond = 2.5e8;

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};

// Bytes per second of `move` over the chunks, until all are done or the time is up.
template <typename Move>
double Rate(Move move) {
  const absl::Time start = RealClock::Get().Now();
  int done = 0;
  while (done < kChunks && RealClock::Get().Now() - start < kMeasureFor) {
    if (!move(static_cast<off_t>(static_cast<uint64_t>(done) * kChunkBytes))) return 0;
    ++done;
  }
  const double seconds = absl::ToDoubleSeconds(RealClock::Get().Now() - start);
  return static_cast<double>(done) * static_cast<double>(kChunkBytes) / seconds;
}

}  // namespace

DiskProbe ProbeDisk(const std::string& folder, bool measure) {
  DiskProbe disk;
  // The store makes the folder: its nearest parent stands for one that is not there yet.
  std::error_code error;
  std::filesystem::path there = std::filesystem::absolute(folder, error);
  while (!std::filesystem::exists(there, error) && there.has_relative_path()) {
    there = there.parent_path();
  }
  std::string path = (there / ".kvtide-probe-XXXXXX").string();
  UniqueFd made(mkostemp(path.data(), O_CLOEXEC));
  if (!made.valid()) {
    disk.status = absl::UnavailableError(
        absl::StrCat(folder, ": no file can be made in ", there.string(), ": ", std::strerror(errno)));
    return disk;
  }
  struct statvfs fs {};
  if (fstatvfs(made.get(), &fs) == 0) disk.free_bytes = uint64_t{fs.f_bavail} * fs.f_frsize;
  UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT));
  disk.direct = file.valid();
  (void)unlink(path.c_str());
  if (!measure || !disk.direct || disk.free_bytes < 2 * kChunks * kChunkBytes) return disk;
  std::unique_ptr<std::byte, Free> buffer(
      static_cast<std::byte*>(std::aligned_alloc(4096, kChunkBytes)));
  std::memset(buffer.get(), 0x5a, kChunkBytes);
  disk.write_bytes_per_s = Rate([&](off_t at) {
    return pwrite(file.get(), buffer.get(), kChunkBytes, at) == static_cast<ssize_t>(kChunkBytes);
  });
  disk.read_bytes_per_s = Rate([&](off_t at) {
    return pread(file.get(), buffer.get(), kChunkBytes, at) >= 0;
  });
  return disk;
}

const char* DiskClass(const DiskProbe& disk) {
  const double slower = disk.write_bytes_per_s < disk.read_bytes_per_s ? disk.write_bytes_per_s
                                                                       : disk.read_bytes_per_s;
  if (slower >= kNvmeBytesPerSecond) return "NVMe class";
  if (slower >= kSsdBytesPerSecond) return "SSD class";
  return "spinning or networked";
}

}  // namespace kvt
