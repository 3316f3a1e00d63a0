#include "kvstore/client/listen_check.h"

#include <errno.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kvstore/client/node_options.h"

namespace kvt {
namespace {

absl::Status BindError(absl::string_view address, int error) {
  const std::string what = absl::StrCat(address, ": ", std::strerror(error));
  switch (error) {
    case EADDRINUSE:
      return absl::AlreadyExistsError(
          absl::StrCat(what, "; another process listens there: stop it or choose another port"));
    case EACCES:
      return absl::PermissionDeniedError(
          absl::StrCat(what, "; choose a port above 1023 or grant CAP_NET_BIND_SERVICE"));
    case EADDRNOTAVAIL:
      return absl::InvalidArgumentError(
          absl::StrCat(what, "; no interface of this host has that address (`ip addr` lists them)"));
    default:
      return absl::UnavailableError(what);
  }
}

}  // namespace

absl::Status CheckCanListen(absl::string_view address) {
  const absl::StatusOr<HostPort> at = ParseHostPort(address);
  if (!at.ok()) return at.status();
  // An IPv6 address stands in brackets.
  const bool brackets = absl::StartsWith(at->host, "[") && absl::EndsWith(at->host, "]");
  const std::string host = brackets ? at->host.substr(1, at->host.size() - 2) : at->host;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.c_str(), absl::StrCat(at->port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(absl::StrCat(address, ": ", gai_strerror(error)));
  }
  absl::Status status;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = 1;
  // As the servers do: an address that is only waiting out its last connections is free.
  (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (fd < 0 || bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 1) != 0) {
    status = BindError(address, errno);
  }
  if (fd >= 0) close(fd);
  freeaddrinfo(found);
  return status;
}

}  // namespace kvt
