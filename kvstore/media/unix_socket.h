// Unix sockets that carry descriptors between processes of one user: SOCK_SEQPACKET, so one send is
// one message, and the peer's death is seen as a hang-up. All functions are thread-safe; every wait
// ends by its deadline (RealClock).
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kvstore/media/shared_mapping.h"

namespace kvt {

struct FdMessage {
  std::vector<std::byte> bytes;
  std::vector<UniqueFd> fds;
};
inline constexpr size_t kFdMessageBytesMax = 4096;
inline constexpr int kFdMessageFdsMax = 8;

// Listens at `path` (replacing a stale socket, mode 0600). Unavailable with path and cause.
absl::StatusOr<UniqueFd> ListenUnix(absl::string_view path);
// Accepts one waiting connection, and lets it in only if its user is ours: PermissionDenied.
// Unavailable when nobody waits.
absl::StatusOr<UniqueFd> AcceptUnix(int listener);
// Connects, by `deadline` (RealClock); the listener's user must be ours.
absl::StatusOr<UniqueFd> ConnectUnix(absl::string_view path, absl::Time deadline);
// Both within kFdMessage*Max. DeadlineExceeded, Unavailable (peer gone), InvalidArgument (oversized
// or truncated).
absl::Status SendFdMessage(int socket, absl::Span<const std::byte> bytes, absl::Span<const int> fds,
                           absl::Time deadline);
absl::StatusOr<FdMessage> ReceiveFdMessage(int socket, absl::Time deadline);

}  // namespace kvt
