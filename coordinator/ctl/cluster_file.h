// The file of `kvtide up`: one local cluster. Its tables are passed on to the daemons' own
// configuration unread, so each daemon checks its keys itself.
//
//   [cluster]      name, model_folder, model_name, calibration, start_timeout
//   [coordinator] [node] [tier] [model]   for the daemons that read them
//   [[store]] [[prefill]] [[decode]]      name or count; other keys go to the daemon's table of that
//                                         name; tables node, tier, model within override the above
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/options.h"

namespace kvt::ctl {

// Table -> key -> value as TOML text.
using ConfigTables = std::map<std::string, std::map<std::string, std::string>>;

struct DaemonPlan {
  std::string kind;  // "coordinator", "store", "prefill", "decode"
  std::string name;
  ConfigTables tables;
};

struct ClusterPlan {
  std::string name = "kvtide";
  std::string model_folder;
  std::string model_name;  // default: the folder's last part
  std::string calibration;  // of the model; empty: none
  absl::Duration start_timeout = absl::Minutes(3);
  DaemonPlan coordinator;
  std::vector<DaemonPlan> daemons;  // stores, prefill workers, decode workers
};

// Daemons of one kind.
inline constexpr int kDaemonCountMax = 64;

// InvalidArgument listing every problem with file and line.
absl::StatusOr<ClusterPlan> ReadClusterPlan(OptionsFile& file);

// A TOML string.
std::string Quoted(absl::string_view text);
// The daemon's configuration file.
std::string RenderConfig(const ConfigTables& tables);

}  // namespace kvt::ctl
