#include "coordinator/ctl/cluster_file.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"

namespace kvt::ctl {
namespace {

void PassOn(OptionsTable table, const std::set<std::string>& except,
            std::map<std::string, std::string>* out) {
  for (const std::string& key : table.Keys()) {
    if (!except.contains(key)) (*out)[key] = table.Render(key);
  }
}

const std::set<std::string> kCommonTables = {"node", "tier", "model"};

// Which of the common tables a daemon reads.
std::vector<std::string> TablesOf(const std::string& kind) {
  if (kind == "coordinator" || kind == "store") return {"node"};
  return {"node", "tier", "model"};
}

void ReadDaemons(OptionsFile& file, const std::string& kind, const ConfigTables& common,
                 ClusterPlan* plan, std::set<std::string>* names) {
  std::vector<OptionsTable> entries = file.Root().Tables(kind);
  if (entries.empty()) {
    file.Root().Problem(kind, absl::StrCat("a cluster needs at least one [[", kind, "]]"));
  }
  int made = 0;
  for (OptionsTable& entry : entries) {
    std::string name;
    int count = 1;
    entry.Get("name", &name);
    entry.Get("count", &count, 1, kDaemonCountMax);
    if (!name.empty() && count > 1) entry.Problem("name", "does not go with count");
    for (int i = 0; i < count; ++i) {
      DaemonPlan daemon{.kind = kind,
                        .name = name.empty() ? absl::StrCat(kind, "-", made) : name,
                        .tables = {}};
      ++made;
      if (!names->insert(daemon.name).second) {
        entry.Problem("name", absl::StrCat("\"", daemon.name, "\" is taken"));
      }
      for (const std::string& table : TablesOf(kind)) {
        daemon.tables[table] = common.at(table);
        PassOn(entry.Table(table), {}, &daemon.tables[table]);
      }
      std::set<std::string> own = kCommonTables;
      own.insert({"name", "count"});
      PassOn(entry, own, &daemon.tables[kind]);
      plan->daemons.push_back(std::move(daemon));
    }
  }
}

}  // namespace

absl::StatusOr<ClusterPlan> ReadClusterPlan(OptionsFile& file) {
  ClusterPlan plan;
  OptionsTable cluster = file.Table("cluster");
  cluster.Get("name", &plan.name);
  cluster.Require("model_folder", &plan.model_folder);
  cluster.Get("model_name", &plan.model_name);
  cluster.Get("calibration", &plan.calibration);
  cluster.Get("start_timeout", &plan.start_timeout, absl::Seconds(1), absl::Hours(1));
  while (plan.model_folder.size() > 1 && plan.model_folder.back() == '/') {
    plan.model_folder.pop_back();
  }
  if (plan.model_name.empty()) {
    plan.model_name = plan.model_folder.substr(plan.model_folder.rfind('/') + 1);
  }
  ConfigTables common;
  for (const std::string& table : kCommonTables) {
    PassOn(file.Table(table), {}, &common[table]);
  }
  plan.coordinator = DaemonPlan{.kind = "coordinator", .name = "coordinator", .tables = {}};
  plan.coordinator.tables["node"] = common["node"];
  PassOn(file.Table("coordinator"), {}, &plan.coordinator.tables["coordinator"]);
  std::set<std::string> names = {"coordinator"};
  for (const char* kind : {"store", "prefill", "decode"}) {
    ReadDaemons(file, kind, common, &plan, &names);
  }
  KVT_RETURN_IF_ERROR(file.Finish());
  return plan;
}

std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&out, "\\u%04X", static_cast<unsigned>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string RenderConfig(const ConfigTables& tables) {
  std::string out;
  for (const auto& [table, keys] : tables) {
    absl::StrAppend(&out, "[", table, "]\n");
    for (const auto& [key, value] : keys) absl::StrAppend(&out, Quoted(key), " = ", value, "\n");
    out += "\n";
  }
  return out;
}

}  // namespace kvt::ctl
