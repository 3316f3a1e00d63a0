// The [node] table of a worker's configuration: who it is and whom it reports to.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/ids.h"
#include "kernels/base/log.h"
#include "kernels/base/options.h"

namespace kvt {

struct NodeOptions {
  NodeName name;            // required; unique in the cluster
  std::string listen = "127.0.0.1:0";       // of the control service; port 0: a free one
  std::string coordinator = "127.0.0.1:7070";
  LogLevel log_level = LogLevel::kInfo;
  std::string log_file;        // empty: stderr
  std::string metrics_listen;  // "host:port"; empty: no metrics endpoint
};

// Reads the table; problems are collected in its file.
NodeOptions ReadNodeOptions(OptionsTable table);

struct HostPort {
  std::string host;
  int port = 0;
};
// Splits "host:port"; InvalidArgument with the text.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view address);

}  // namespace kvt
