#include "kvstore/client/node_options.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace kvt {
namespace {

void ReadLogLevel(OptionsTable& table, LogLevel* out) {
  std::string level;
  table.Get("log_level", &level);
  if (level.empty() || level == "info") return;
  if (level == "debug") {
    *out = LogLevel::kDebug;
  } else if (level == "warning") {
    *out = LogLevel::kWarning;
  } else if (level == "error") {
    *out = LogLevel::kError;
  } else {
    table.Problem("log_level", "expected \"debug\", \"info\", \"warning\" or \"error\"");
  }
}

}  // namespace

NodeOptions ReadNodeOptions(OptionsTable table) {
  NodeOptions options;
  table.Require("name", &options.name);
  table.Get("listen", &options.listen);
  table.Get("coordinator", &options.coordinator);
  ReadLogLevel(table, &options.log_level);
  table.Get("log_file", &options.log_file);
  table.Get("metrics_listen", &options.metrics_listen);
  if (!ParseHostPort(options.listen).ok()) table.Problem("listen", "expected \"host:port\"");
  if (!ParseHostPort(options.coordinator).ok()) {
    table.Problem("coordinator", "expected \"host:port\"");
  }
  if (!options.metrics_listen.empty() && !ParseHostPort(options.metrics_listen).ok()) {
    table.Problem("metrics_listen", "expected \"host:port\"");
  }
  return options;
}

absl::StatusOr<HostPort> ParseHostPort(absl::string_view address) {
  HostPort result;
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &result.port) || result.port < 0 ||
      result.port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address, "\": expected \"host:port\""));
  }
  result.host = std::string(address.substr(0, colon));
  return result;
}

}  // namespace kvt
