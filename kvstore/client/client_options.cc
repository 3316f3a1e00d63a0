#include "kvstore/client/client_options.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace kvt {
namespace {

constexpr size_t kSecretBytesMin = 16;
constexpr size_t kSecretBytesMax = 1024;

void ReadTransport(OptionsTable& table, TierTransport* out) {
  std::string name;
  table.Get("transport", &name);
  if (name.empty()) return;
  if (name == "auto") {
    *out = TierTransport::kAuto;
  } else if (name == "ucx") {
    *out = TierTransport::kUcx;
  } else if (name == "shm") {
    *out = TierTransport::kShm;
  } else {
    table.Problem("transport", absl::StrCat("'", name, "' is none of auto, ucx, shm"));
  }
}

}  // namespace

ClientOptions ReadClientOptions(OptionsTable table) {
  ClientOptions o;
  constexpr absl::Duration kShortest = absl::Milliseconds(10);
  ReadTransport(table, &o.transport);
  table.Get("verify_checksums", &o.verify_checksums);
  table.Get("ucx_net_devices", &o.ucx_net_devices);
  table.Get("ucx_tls", &o.ucx_tls);
  table.Get("shm_gather_threads", &o.shm_gather_threads, 1, 8);
  table.Get("control_timeout", &o.control_timeout, kShortest, absl::Seconds(60));
  table.Get("lookup_timeout", &o.lookup_timeout, kShortest, absl::Seconds(60));
  table.Get("transfer_timeout", &o.transfer_timeout, kShortest, absl::Minutes(10));
  table.Get("connect_timeout", &o.connect_timeout, kShortest, absl::Seconds(60));
  table.Get("breaker_failures", &o.breaker_failures, 1, 100);
  table.Get("breaker_pause", &o.breaker_pause, kShortest, absl::Minutes(10));
  table.Get("breaker_pause_max", &o.breaker_pause_max, kShortest, absl::Hours(1));
  table.Get("control_threads", &o.control_threads, 1, 64);
  table.Get("cluster_secret_file", &o.cluster_secret_file);
  if (o.breaker_pause_max < o.breaker_pause) {
    table.Problem("breaker_pause_max", "is shorter than breaker_pause");
  }
  return o;
}

absl::StatusOr<std::string> ReadClusterSecret(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return absl::NotFoundError(absl::StrCat("cluster secret ", path, ": ", std::strerror(errno)));
  }
  struct stat info{};
  std::string bytes(kSecretBytesMax + 1, '\0');
  const bool stated = fstat(fd, &info) == 0;
  const ssize_t got = read(fd, bytes.data(), bytes.size());
  close(fd);
  if (!stated || got < 0) {
    return absl::NotFoundError(absl::StrCat("cluster secret ", path, ": cannot be read"));
  }
  if ((info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("cluster secret ", path, " is readable by others than its owner: chmod 600 it"));
  }
  bytes.resize(static_cast<size_t>(got));
  absl::StripTrailingAsciiWhitespace(&bytes);
  if (bytes.size() < kSecretBytesMin || bytes.size() > kSecretBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("cluster secret ", path, " has ", bytes.size(),
                                                   " bytes; want ", kSecretBytesMin, " to ",
                                                   kSecretBytesMax));
  }
  return bytes;
}

}  // namespace kvt
