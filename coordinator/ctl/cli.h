// What every kvtide command shares: where the cluster is, how to print, what an error becomes.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt::ctl {

// Exit codes, as --help documents them.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;       // the operation or request failed
inline constexpr int kExitBadInput = 2;     // command line, configuration or input
inline constexpr int kExitNoCluster = 3;    // not running or not reachable
inline constexpr int kExitRefused = 4;      // the cluster cannot take it now
inline constexpr int kExitInterrupted = 130;

struct Cli {
  std::string coordinator;  // "host:port"; empty: from the run directory
  std::string run_dir;      // never empty
  bool json = false;

  // NotRunning when neither is there.
  [[nodiscard]] absl::StatusOr<std::string> CoordinatorAddress() const;
  [[nodiscard]] absl::StatusOr<std::unique_ptr<CoordinatorApi>> Connect() const;
};

// Deadline of the calls that commands make.
inline constexpr absl::Duration kCallTimeout = absl::Seconds(3);

// KVTIDE_RUN_DIR, else ./var/run/kvtide.
std::string DefaultRunDir();
// Folder of this program: the daemons stand beside it.
std::string ProgramFolder();

int ExitCode(const absl::Status& status);
// Prints an error for people on stderr, or {"error":{"code","message"}} on stdout, and returns the
// exit code.
int Fail(const Cli& cli, const absl::Status& status);
// "NOT_FOUND".
std::string CodeName(absl::StatusCode code);

}  // namespace kvt::ctl
