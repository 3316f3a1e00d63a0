// Starting, watching and ending the daemons of a local cluster. Linux only.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvt::ctl {

// A process, not whatever has its pid later.
struct ProcessId {
  pid_t pid = 0;
  uint64_t start_ticks = 0;
};

// Runs `arguments` (the first is the program) in a session of its own, input from /dev/null, output
// appended to `log_file`.
absl::StatusOr<ProcessId> Spawn(const std::vector<std::string>& arguments,
                                const std::string& log_file);

// Field 22 of /proc/PID/stat; 0 when there is no such process or it has ended (a zombie).
uint64_t StartTicks(pid_t pid);
bool IsAlive(const ProcessId& process);

// Waits until one of them has ended, or `timeout`. Index of one that has ended, or -1.
int WaitAnyGone(const std::vector<ProcessId>& processes, absl::Duration timeout);

struct StopReport {
  int terminated = 0;  // ended by SIGTERM in time
  int killed = 0;      // needed SIGKILL
  int gone = 0;        // had ended before
};
// SIGTERM, then SIGKILL for those that are still there after `grace`; returns when all are gone
// (bounded: a second after SIGKILL).
StopReport StopAll(const std::vector<ProcessId>& processes, absl::Duration grace);

// How a child of this process ended ("exit code 1", "signal Killed"); reaps it.
std::string HowItEnded(pid_t child);

// The last lines of a log, at most `lines` and 4 KiB.
std::string LastLines(const std::string& path, int lines);

}  // namespace kvt::ctl
