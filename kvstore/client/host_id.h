// Which host this is: equal ids share memory. The kernel's boot id.
#pragma once

#include <string>

namespace kvt {

// Empty when the kernel does not tell; then nobody shares a host.
std::string LocalHostId();

}  // namespace kvt
