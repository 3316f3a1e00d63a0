#include "coordinator/ctl/doctor.h"

#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/ctl/cluster_file.h"
#include "coordinator/ctl/process.h"
#include "coordinator/ctl/run_state.h"
#include "kernels/base/check.h"
#include "kernels/model/model_config.h"
#include "kernels/model/safetensors.h"
#include "kernels/model/tokenizer.h"
#include "kvstore/client/listen_check.h"

namespace kvt::ctl {
namespace {

// Longer than a probe takes, its disk measurement included.
constexpr absl::Duration kProbeTimeout = absl::Seconds(15);

struct Finding {
  std::string node;  // "store-0", "workers", "cluster"
  std::string check;
  std::string state;  // "ok", "warn", "fail"
  std::string found;
  std::string remedy;
};

// A folder of ours that goes with its files.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "kvtide-doctor-XXXXXX").string();
    if (mkdtemp(path.data()) != nullptr) path_ = path;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Doctor {
 public:
  Doctor(const Cli& cli, const DoctorOptions& options) : cli_(cli), options_(options) {}

  std::vector<Finding> Run() {
    if (scratch_.path().empty()) {
      Say("cluster", "temporary folder", "fail", std::strerror(errno), "set TMPDIR to a writable folder");
      return findings_;
    }
    if (options_.config.empty()) {
      Probe("host", std::nullopt, {});
      return findings_;
    }
    absl::StatusOr<ClusterPlan> plan = Read();
    if (!plan.ok()) {
      Say("cluster", "configuration", "fail", std::string(plan.status().message()),
          "correct the file (docs/CONFIG.md)");
      return findings_;
    }
    RunDir();
    Model(*plan);
    Coordinator(*plan);
    std::set<std::string> worker_devices;
    for (DaemonPlan& daemon : plan->daemons) {
      if (daemon.kind == "store") {
        daemon.tables["node"]["name"] = Quoted(daemon.name);
        Probe(daemon.name, daemon.tables, {});
      } else if (daemon.tables["tier"].contains("ucx_net_devices")) {
        worker_devices.insert(daemon.tables["tier"]["ucx_net_devices"]);
      }
    }
    for (const std::string& devices : worker_devices) {
      ConfigTables tables;
      tables["node"]["name"] = Quoted("workers");
      tables["store"]["ucx_net_devices"] = devices;
      Probe("workers", tables, "ucx devices");
    }
    return findings_;
  }

 private:
  void Say(std::string node, std::string check, std::string state, std::string found,
           std::string remedy) {
    findings_.push_back({std::move(node), std::move(check), std::move(state), std::move(found),
                         std::move(remedy)});
  }
  // Fails with the status' message, or is fine with `found`.
  void Say(const std::string& node, const std::string& check, const absl::Status& status,
           const std::string& found, const std::string& remedy) {
    if (status.ok()) return Say(node, check, "ok", found, "");
    Say(node, check, "fail", std::string(status.message()), remedy);
  }

  absl::StatusOr<ClusterPlan> Read() const {
    KVT_ASSIGN_OR_RETURN(OptionsFile file, OptionsFile::Load(options_.config));
    return ReadClusterPlan(file);
  }

  void RunDir() {
    std::error_code error;
    std::filesystem::path folder = std::filesystem::absolute(cli_.run_dir, error);
    // `up` makes it: the nearest folder above that exists must be writable.
    while (!std::filesystem::exists(folder, error) && folder.has_relative_path()) {
      folder = folder.parent_path();
    }
    const bool writable = access(folder.c_str(), W_OK | X_OK) == 0;
    Say("cluster", "run directory", writable ? "ok" : "fail",
        writable ? cli_.run_dir : absl::StrCat(folder.string(), ": ", std::strerror(errno)),
        writable ? "" : "give another --run-dir");
  }

  void Model(const ClusterPlan& plan) {
    const std::string remedy = "name a Hugging Face folder in cluster.model_folder "
                               "(deploy/fetch_model.sh gets one)";
    const std::string& folder = plan.model_folder;
    if (!std::filesystem::is_directory(folder)) {
      return Say("cluster", "model folder", "fail", absl::StrCat(folder, " is not a folder"), remedy);
    }
    absl::Status status = LoadModelConfig(folder).status();
    if (status.ok()) status = Tokenizer::Load(folder).status();
    if (status.ok()) status = Safetensors::Open(folder).status();
    Say("cluster", "model folder", status, folder, remedy);
  }

  void Coordinator(const ClusterPlan& plan) {
    const auto tables = plan.coordinator.tables.find("coordinator");
    std::string listen;
    if (tables != plan.coordinator.tables.end() && tables->second.contains("listen")) {
      listen = tables->second.at("listen");
    }
    // As it stands in TOML: in quotes.
    if (listen.size() > 2 && listen.front() == '"') listen = listen.substr(1, listen.size() - 2);
    if (listen.empty()) return;
    Say("coordinator", "listen", CheckCanListen(listen), absl::StrCat(listen, " is free"),
        "change coordinator.listen or stop what is there");
  }

  // Runs kvtide-store --probe; keeps all lines, or the one of `check`.
  void Probe(const std::string& node, const std::optional<ConfigTables>& tables,
             absl::string_view check) {
    std::vector<std::string> command = {ProgramFolder() + "/kvtide-store", "--probe", "-o", "json"};
    if (tables.has_value()) {
      const std::string config = scratch_.path() + "/probe.toml";
      const absl::Status written = WriteFile(config, RenderConfig(*tables));
      if (!written.ok()) {
        return Say(node, "probe", "fail", std::string(written.message()), "free room in TMPDIR");
      }
      command.insert(command.end(), {"--config", config});
    }
    const std::string answer = scratch_.path() + "/probe.json";
    unlink(answer.c_str());
    const absl::StatusOr<ProcessId> child = Spawn(command, answer);
    if (!child.ok()) {
      return Say(node, "probe", "fail", std::string(child.status().message()),
                 "kvtide-store stands beside kvtide: install both");
    }
    if (WaitAnyGone({*child}, kProbeTimeout) < 0) {
      StopAll({*child}, absl::ZeroDuration());
      return Say(node, "probe", "fail",
                 absl::StrCat("no answer in ", absl::FormatDuration(kProbeTimeout)),
                 "run `kvtide-store --probe` by hand: a device or a disk hangs");
    }
    const std::string how = HowItEnded(child->pid);
    const auto text = ReadFile(answer);
    const auto json = nlohmann::json::parse(text.ok() ? *text : "", nullptr, false);
    if (!json.is_object() || !json.contains("checks")) {
      return Say(node, "probe", "fail",
                 absl::StrCat(how, ": ", LastLines(answer, 4)), "run `kvtide-store --probe` by hand");
    }
    for (const auto& line : json["checks"]) {
      const std::string name = line.value("check", "");
      if (!check.empty() && name != check) continue;
      Say(node, name, line.value("state", "fail"), line.value("found", ""), line.value("remedy", ""));
    }
  }

  const Cli& cli_;
  const DoctorOptions& options_;
  ScratchFolder scratch_;
  std::vector<Finding> findings_;
};

int Count(const std::vector<Finding>& findings, absl::string_view state) {
  int count = 0;
  for (const Finding& finding : findings) count += finding.state == state ? 1 : 0;
  return count;
}

}  // namespace

int RunDoctor(const Cli& cli, const DoctorOptions& options) {
  const std::vector<Finding> findings = Doctor(cli, options).Run();
  const int failed = Count(findings, "fail");
  if (cli.json) {
    nlohmann::json checks = nlohmann::json::array();
    for (const Finding& finding : findings) {
      checks.push_back({{"node", finding.node},
                        {"check", finding.check},
                        {"state", finding.state},
                        {"found", finding.found},
                        {"remedy", finding.remedy}});
    }
    const nlohmann::json all = {{"checks", checks},
                                {"ok", Count(findings, "ok")},
                                {"warn", Count(findings, "warn")},
                                {"fail", failed}};
    std::printf("%s\n", all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    return failed == 0 ? kExitOk : kExitFailed;
  }
  for (const Finding& finding : findings) {
    std::printf("%-4s  %-12s %-16s  %s\n", finding.state.c_str(), finding.node.c_str(),
                finding.check.c_str(), finding.found.c_str());
    if (!finding.remedy.empty()) std::printf("%36s-> %s\n", "", finding.remedy.c_str());
  }
  std::printf("%d ok, %d to improve, %d to mend\n", Count(findings, "ok"), Count(findings, "warn"),
              failed);
  return failed == 0 ? kExitOk : kExitFailed;
}

}  // namespace kvt::ctl
