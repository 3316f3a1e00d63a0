// `kvtide doctor`: what of this host would keep a cluster from starting or from working well, before it
// is started. Each store's configuration goes through `kvtide-store --probe`; the model's folder, the
// workers' network devices, the coordinator's address and the run directory are checked here.
#pragma once

#include <string>

#include "coordinator/ctl/cli.h"

namespace kvt::ctl {

struct DoctorOptions {
  std::string config;  // cluster file as of `kvtide up`; empty: a store with defaults
};

// Prints a table, or {"checks": [{"node", "check", "state", "found", "remedy"}], "ok", "warn", "fail"}
// with -o json. kExitOk when nothing failed, else kExitFailed.
int RunDoctor(const Cli& cli, const DoctorOptions& options);

}  // namespace kvt::ctl
