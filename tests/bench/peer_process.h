// A peer of peers_bench: its driver (tests/bench/peers, which explains the conversation) and the other
// end, which the driver starts. Both are stopped (SIGSTOP) while somebody else is measured. Not
// thread-safe.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvt {

// Seconds that threads of the process waited for a processor so far: what other programs cost it.
double WaitedSeconds(pid_t pid);

// Binds every thread of the process to `cpu`; -1: to any.
void BindProcess(pid_t pid, int cpu);

class PeerProcess {
 public:
  // Starts it; environment: added to this process's own. Why it cannot run is in status().
  PeerProcess(const std::vector<std::string>& command,
              const std::vector<std::pair<std::string, std::string>>& environment);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  [[nodiscard]] const absl::Status& status() const { return status_; }
  absl::Status Load(const std::string& plan_file) { return Ask("load " + plan_file).status(); }
  absl::Status Check() { return Ask("check").status(); }
  // Seconds of one run.
  absl::StatusOr<double> Run();
  // Of the driver and its other end.
  [[nodiscard]] double Waited() const { return WaitedSeconds(pid_) + WaitedSeconds(target_); }
  void Stop();      // SIGSTOP
  void Continue();  // SIGCONT
  // Client and other end to a processor each, or to any.
  void Bind(bool pinned);

 private:
  // The answer; a failure, a timeout or an end becomes status() too.
  absl::StatusOr<std::string> Ask(const std::string& line);
  absl::StatusOr<std::string> ReadLine(absl::Duration timeout);

  absl::Status status_;
  pid_t pid_ = -1;
  pid_t target_ = -1;
  int in_ = -1;
  int out_ = -1;
};

}  // namespace kvt
