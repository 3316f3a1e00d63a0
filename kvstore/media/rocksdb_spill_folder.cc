#include "kvstore/media/rocksdb_spill_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/media/rocksdb_spill_format.h"

namespace kvt {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path) {
  const int error = errno;
  const std::string message = absl::StrCat("spill: ", what, " ", path, ": ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
  return absl::UnavailableError(message);
}

absl::Status SyncFolder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return Failed("open", path);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  if (fsync(fd) != 0) return Failed("sync", path);
  return absl::OkStatus();
}

absl::Status WriteDurably(const std::string& folder, const std::string& path,
                          const std::string& text) {
  const std::string temporary = absl::StrCat(path, ".new");
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return Failed("create", temporary);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  if (write(fd, text.data(), text.size()) != static_cast<ssize_t>(text.size()) || fsync(fd) != 0) {
    return Failed("write", temporary);
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) return Failed("rename", temporary);
  return SyncFolder(folder);
}

absl::StatusOr<std::string> ReadSmall(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return errno == ENOENT ? absl::NotFoundError(path) : Failed("open", path);
  const absl::Cleanup close_fd = [fd] { close(fd); };
  char buffer[256];
  const ssize_t got = read(fd, buffer, sizeof buffer);
  if (got < 0) return Failed("read", path);
  return std::string(buffer, static_cast<size_t>(got));
}

absl::Status ProbeDirectIo(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/staging/probe");
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
  if (fd < 0) {
    if (errno != EINVAL && errno != EOPNOTSUPP) return Failed("create", path);
    return absl::FailedPreconditionError(
        absl::StrCat("spill: the file system of ", folder,
                     " has no O_DIRECT: switch direct I/O off or choose another folder"));
  }
  close(fd);
  unlink(path.c_str());
  return absl::OkStatus();
}

}  // namespace

absl::Status PrepareSpillFolder(const std::string& folder, bool direct_io) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("spill: make ", folder, ": ", error.message()));
  }
  const std::string format_path = absl::StrCat(folder, "/FORMAT");
  const absl::StatusOr<std::string> format = ReadSmall(format_path);
  uint32_t version = 0;
  if (format.ok()) {
    const absl::StatusOr<uint32_t> checked = CheckSpillFormat(*format);
    if (!checked.ok()) {
      return absl::Status(checked.status().code(),
                          absl::StrCat("spill folder ", folder, ": ", checked.status().message()));
    }
    version = *checked;
  } else if (!absl::IsNotFound(format.status())) {
    return format.status();
  } else if (std::filesystem::exists(absl::StrCat(folder, "/db"), error)) {
    return absl::FailedPreconditionError(
        absl::StrCat("spill folder ", folder,
                     " holds a db without a FORMAT: it is not ours; choose another folder"));
  }
  // From now on it holds what this version writes.
  if (version != kSpillFormat) {
    KVT_RETURN_IF_ERROR(WriteDurably(folder, format_path, EncodeSpillFormat(kSpillFormat)));
  }
  const std::string staging = absl::StrCat(folder, "/staging");
  if (mkdir(staging.c_str(), 0700) != 0 && errno != EEXIST) return Failed("make", staging);
  return direct_io ? ProbeDirectIo(folder) : absl::OkStatus();
}

}  // namespace kvt
