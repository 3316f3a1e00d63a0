// What a folder's disk can do: writable, O_DIRECT, room, and its speed. Leaves nothing behind.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace kvt {

struct DiskProbe {
  absl::Status status;  // not ok: no folder, not writable
  uint64_t free_bytes = 0;
  bool direct = false;           // O_DIRECT works
  double write_bytes_per_s = 0;  // zero: not measured
  double read_bytes_per_s = 0;
};

// `measure`: writes 64 MiB and reads them back past the page cache, each for at most half a second.
DiskProbe ProbeDisk(const std::string& folder, bool measure);

// "NVMe class", "SSD class", "spinning or networked".
const char* DiskClass(const DiskProbe& disk);

}  // namespace kvt
