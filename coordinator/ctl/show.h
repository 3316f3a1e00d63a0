// `kvtide status`, `nodes`, `tier`, `requests`: what the cluster says of itself. Each prints a table,
// or one JSON object with -o json, and returns the exit code.
#pragma once

#include <string>

#include "coordinator/ctl/cli.h"

namespace kvt::ctl {

struct RequestsOptions {
  int limit = 20;  // finished ones shown; 0: all
};

struct PurgeOptions {
  std::string tenant;  // "": the shared domain
  int wait_s = 10;     // for each store's disk
};

int RunStatus(const Cli& cli);
int RunNodes(const Cli& cli);
int RunTier(const Cli& cli);
// `tier purge`: everything of a tenant out of every store. kExitFailed when a store was not reached
// (a dead one's disk keeps what it has) or is not done yet: to be run again.
int RunTierPurge(const Cli& cli, const PurgeOptions& options);
int RunRequests(const Cli& cli, const RequestsOptions& options);

}  // namespace kvt::ctl
