#include "kvstore/client/host_id.h"

#include <fstream>

namespace kvt {

std::string LocalHostId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

}  // namespace kvt
