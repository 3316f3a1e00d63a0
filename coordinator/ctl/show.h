// `kvtide status`, `nodes`, `tier`, `requests`: what the cluster says of itself. Each prints a table,
// or one JSON object with -o json, and returns the exit code.
#pragma once

#include "coordinator/ctl/cli.h"

namespace kvt::ctl {

struct RequestsOptions {
  int limit = 20;  // finished ones shown; 0: all
};

int RunStatus(const Cli& cli);
int RunNodes(const Cli& cli);
int RunTier(const Cli& cli);
int RunRequests(const Cli& cli, const RequestsOptions& options);

}  // namespace kvt::ctl
