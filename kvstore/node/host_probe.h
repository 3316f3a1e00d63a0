// What keeps, or would keep, a store from working well on this host: limits, shared memory, UCX, GPU,
// huge pages, disk, ports. `kvtide-store --probe` and `kvtide doctor` print it; the daemon refuses to
// start on what fails. Reads the system; changes nothing but files of its own in the spill folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace kvt {

enum class ProbeState : uint8_t { kOk, kWarn, kFail };
const char* ProbeStateName(ProbeState state);  // "ok", "warn", "fail"

struct ProbeLine {
  std::string check;  // "locked memory", "ucx devices"
  ProbeState state = ProbeState::kOk;
  std::string found;
  std::string remedy;  // empty when ok
};

struct HostProbeOptions {
  uint64_t arena_bytes = 0;
  bool ucx = true;
  std::string net_devices;  // UCX_NET_DEVICES; empty: UCX chooses
  std::string tls;          // UCX_TLS
  // Addresses to listen on, with what each is for; empty addresses are skipped.
  struct Listen {
    std::string what;
    std::string address;
  };
  std::vector<Listen> listens;
  std::string spill_folder;  // empty: nothing is spilled
  uint64_t spill_bytes = 0;  // that may be spilled
  // Writes and reads 64 MiB in the spill folder, at most about a second.
  bool measure_disk = false;
};

// In a fixed order. Takes well under a second without measure_disk.
std::vector<ProbeLine> ProbeHost(const HostProbeOptions& options);

// FailedPrecondition naming every failed check with its remedy.
absl::Status ProbeStatus(const std::vector<ProbeLine>& lines);

// For people: a line each. For programs: {"checks": [{"check", "state", "found", "remedy"}]}.
std::string ProbeText(const std::vector<ProbeLine>& lines);
std::string ProbeJson(const std::vector<ProbeLine>& lines);

}  // namespace kvt
