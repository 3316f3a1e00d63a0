#include "kvstore/media/unix_socket.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"

namespace kvt {
namespace {

absl::Status SocketError(absl::string_view what, absl::string_view where, int error) {
  return absl::UnavailableError(absl::StrCat(what, " ", where, ": ", std::strerror(error)));
}

absl::StatusOr<sockaddr_un> AddressOf(absl::string_view path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket path '", path,
                                                   "' is empty or longer than ",
                                                   sizeof(address.sun_path) - 1, " bytes"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::Status CheckPeer(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return SocketError("peer credentials of", "unix socket", errno);
  }
  if (peer.uid != geteuid()) {
    return absl::PermissionDeniedError(
        absl::StrCat("unix socket: the peer (pid ", peer.pid, ") runs as user ", peer.uid,
                     ", this process as ", geteuid(), "; same-host transfers need one user"));
  }
  return absl::OkStatus();
}

// Waits until `events` or a hang-up.
absl::Status WaitFor(int socket, short events, absl::Time deadline) {
  while (true) {
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError("unix socket: the peer did not answer by the deadline");
    }
    const int64_t timeout_ms = std::clamp<int64_t>(
        absl::ToInt64Milliseconds(std::min(left, absl::Seconds(60))) + 1, 1, 60'000);
    pollfd poll_fd{socket, events, 0};
    const int ready = poll(&poll_fd, 1, static_cast<int>(timeout_ms));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return SocketError("poll of", "unix socket", errno);
  }
}

}  // namespace

absl::StatusOr<UniqueFd> ListenUnix(absl::string_view path) {
  KVT_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid()) return SocketError("socket for", path, errno);
  struct stat info;
  if (lstat(address.sun_path, &info) == 0 && S_ISSOCK(info.st_mode)) {
    // Stale unless somebody answers.
    UniqueFd probe(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      return absl::UnavailableError(absl::StrCat(path, ": another process listens there"));
    }
    (void)unlink(address.sun_path);
  }
  const mode_t mask = umask(0177);
  const int bound =
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = errno;
  (void)umask(mask);
  if (bound != 0) return SocketError("bind to", path, error);
  if (listen(listener.get(), 64) != 0) return SocketError("listen at", path, errno);
  return listener;
}

absl::StatusOr<UniqueFd> AcceptUnix(int listener) {
  UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) return SocketError("accept on", "unix socket", errno);
  KVT_RETURN_IF_ERROR(CheckPeer(socket.get()));
  return socket;
}

absl::StatusOr<UniqueFd> ConnectUnix(absl::string_view path, absl::Time deadline) {
  KVT_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return SocketError("socket for", path, errno);
  // EAGAIN: the listener's queue is full; it is drained soon or not at all.
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (errno != EAGAIN && errno != EINTR) return SocketError("connect to", path, errno);
    if (RealClock::Get().Now() >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat("connect to ", path, ": deadline passed"));
    }
    (void)poll(nullptr, 0, 1);
  }
  KVT_RETURN_IF_ERROR(CheckPeer(fd.get()));
  return fd;
}

absl::Status SendFdMessage(int socket, absl::Span<const std::byte> bytes, absl::Span<const int> fds,
                           absl::Time deadline) {
  if (bytes.empty() || bytes.size() > kFdMessageBytesMax || fds.size() > kFdMessageFdsMax) {
    return absl::InvalidArgumentError(absl::StrCat("unix socket: message of ", bytes.size(),
                                                   " bytes and ", fds.size(), " descriptors"));
  }
  iovec io{const_cast<std::byte*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdMessageFdsMax)] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  }
  while (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return SocketError("send on", "unix socket", errno);
    KVT_RETURN_IF_ERROR(WaitFor(socket, POLLOUT, deadline));
  }
  return absl::OkStatus();
}

absl::StatusOr<FdMessage> ReceiveFdMessage(int socket, absl::Time deadline) {
  FdMessage result;
  result.bytes.resize(kFdMessageBytesMax);
  iovec io{result.bytes.data(), result.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kFdMessageFdsMax)];
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  ssize_t got = 0;
  while (true) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got >= 0) break;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return SocketError("receive on", "unix socket", errno);
    KVT_RETURN_IF_ERROR(WaitFor(socket, POLLIN, deadline));
  }
  // Take ownership of every descriptor first, so that none leaks on a refusal.
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      result.fds.emplace_back(fd);
    }
  }
  if (got == 0) return absl::UnavailableError("unix socket: the peer closed the connection");
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return absl::InvalidArgumentError("unix socket: oversized message");
  }
  result.bytes.resize(static_cast<size_t>(got));
  return result;
}

}  // namespace kvt
