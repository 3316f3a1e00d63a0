// `kvtide up` and `kvtide down`: a local cluster's processes.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "coordinator/ctl/cli.h"

namespace kvt::ctl {

struct UpOptions {
  std::string config;
  absl::Duration timeout;  // zero: the file's start_timeout
};

// Starts the cluster and returns when every daemon has registered; they go on running. On a failure
// or Ctrl-C everything that was started is stopped again. Exit code.
int RunUp(const Cli& cli, const UpOptions& options);

struct DownOptions {
  absl::Duration grace = absl::Seconds(25);  // workers let running requests end
};

// SIGTERM to workers, then stores, then the coordinator; SIGKILL after `grace`. Exit code.
int RunDown(const Cli& cli, const DownOptions& options);

}  // namespace kvt::ctl
