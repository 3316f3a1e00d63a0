// Configuration of kvtide-coordinator. Read in main only; docs/CONFIG.md lists every key.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "coordinator/core/core_options.h"
#include "kernels/base/log.h"
#include "kernels/base/options.h"

namespace kvt {

struct CoordinatorOptions {
  std::string listen = "127.0.0.1:7070";  // loopback unless said otherwise; port 0: a free one
  std::string address_file;    // gets "host:port" once listening; empty: none
  std::string ticket_key_file; // PEM, made when absent; empty: a key for this run only
  LogLevel log_level = LogLevel::kInfo;
  std::string log_file;        // empty: stderr
  std::string metrics_listen;  // "host:port"; empty: no metrics endpoint
  CoordinatorCoreOptions core;
};

// InvalidArgument listing every problem with file and line.
absl::StatusOr<CoordinatorOptions> ReadCoordinatorOptions(OptionsFile& file);

}  // namespace kvt
