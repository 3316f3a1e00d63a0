// run-dir/cluster.json: what `kvtide up` started, for the other commands.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvt::ctl {

struct RunProcess {
  std::string name;
  std::string kind;  // "coordinator", "store", "prefill", "decode"
  int64_t pid = 0;
  uint64_t start_ticks = 0;  // tells the process from a later one with its pid
  std::string config_file;
  std::string log_file;
};

struct RunState {
  std::string name;
  std::string coordinator;  // "host:port"; empty while starting
  std::string model_name;
  std::string model_folder;
  std::vector<RunProcess> processes;
};

std::string StateFile(const std::string& run_dir);
// NotFound; InvalidArgument naming the file when it is not ours.
absl::StatusOr<RunState> ReadRunState(const std::string& run_dir);
// Appears whole or not at all.
absl::Status WriteRunState(const std::string& run_dir, const RunState& state);
// Whole, owner-only files; used for the state, configs and secrets.
absl::Status WriteFile(const std::string& path, const std::string& text);
absl::StatusOr<std::string> ReadFile(const std::string& path);

}  // namespace kvt::ctl
