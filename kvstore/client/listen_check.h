// Whether this process could listen on an address. Stateless; thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvt {

// Binds "host:port" for a moment. AlreadyExists (somebody listens there), PermissionDenied (a port
// below 1024), InvalidArgument (no such address on this host, or malformed); each names the address
// and the remedy. Port 0 and names resolve as usual.
absl::Status CheckCanListen(absl::string_view address);

}  // namespace kvt
