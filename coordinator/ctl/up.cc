#include "coordinator/ctl/up.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "coordinator/ctl/cluster_file.h"
#include "coordinator/ctl/process.h"
#include "coordinator/ctl/run_state.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt::ctl {
namespace {

constexpr absl::Duration kPollInterval = absl::Milliseconds(50);
// A daemon that is still loading its model takes no signal, and holds nothing yet.
constexpr absl::Duration kRollbackGrace = absl::Seconds(1);
constexpr absl::Duration kTellStartingEvery = absl::Seconds(1);
constexpr int kLogLines = 12;

std::string BinaryOf(const std::string& kind) {
  return absl::StrCat(ProgramFolder(), "/kvtide-", kind);
}

std::string FreshSecret() {
  std::string hex;
  for (int i = 0; i < 4; ++i) absl::StrAppendFormat(&hex, "%016x", Random::FromEntropy().Next());
  return hex;
}

ProcessId IdOf(const RunProcess& process) {
  return ProcessId{static_cast<pid_t>(process.pid), process.start_ticks};
}

// One run of `up`. Stops what it started unless Keep() was called.
class Start {
 public:
  Start(const Cli& cli, ClusterPlan plan, absl::Duration timeout)
      : cli_(cli),
        plan_(std::move(plan)),
        timeout_(timeout),
        began_(absl::Now()),
        deadline_(began_ + timeout) {}
  ~Start() {
    if (kept_ || state_.processes.empty()) return;
    std::vector<ProcessId> all;
    for (const RunProcess& process : state_.processes) all.push_back(IdOf(process));
    StopAll(all, kRollbackGrace);
    unlink(StateFile(cli_.run_dir).c_str());
    Say("stopped everything that was started");
  }

  absl::Status Run() {
    KVT_RETURN_IF_ERROR(Prepare());
    KVT_RETURN_IF_ERROR(Launch(plan_.coordinator));
    KVT_RETURN_IF_ERROR(AwaitCoordinator());
    for (DaemonPlan& daemon : plan_.daemons) {
      daemon.tables["node"]["coordinator"] = Quoted(state_.coordinator);
      KVT_RETURN_IF_ERROR(Launch(daemon));
    }
    KVT_RETURN_IF_ERROR(AwaitDaemons());
    kept_ = true;
    return absl::OkStatus();
  }

  [[nodiscard]] const RunState& state() const { return state_; }
  [[nodiscard]] double seconds() const { return absl::ToDoubleSeconds(absl::Now() - began_); }

 private:
  void Say(const std::string& text) const {
    if (!cli_.json) std::fprintf(stderr, "[%6.2f s] %s\n", seconds(), text.c_str());
  }
  std::string Path(const std::string& name) const { return cli_.run_dir + "/" + name; }

  absl::Status Prepare() {
    std::set<std::string> kinds = {"coordinator"};
    for (const DaemonPlan& daemon : plan_.daemons) kinds.insert(daemon.kind);
    for (const std::string& kind : kinds) {
      if (access(BinaryOf(kind).c_str(), X_OK) != 0) {
        return absl::NotFoundError(absl::StrCat(BinaryOf(kind), ": ", std::strerror(errno),
                                                " (the daemons stand beside kvtide)"));
      }
    }
    std::error_code error;
    plan_.model_folder = std::filesystem::absolute(plan_.model_folder, error).string();
    if (!std::filesystem::is_directory(plan_.model_folder, error)) {
      return absl::NotFoundError(absl::StrCat("cluster.model_folder: ", plan_.model_folder,
                                              " is not a folder (deploy/fetch_model.sh gets one)"));
    }
    if (!plan_.calibration.empty()) {
      plan_.calibration = std::filesystem::absolute(plan_.calibration, error).string();
      if (!std::filesystem::is_regular_file(plan_.calibration, error)) {
        return absl::NotFoundError(absl::StrCat("cluster.calibration: ", plan_.calibration,
                                                " is not a file (kvtide calibrate makes one)"));
      }
    }
    state_.name = plan_.name;
    state_.model_name = plan_.model_name;
    state_.model_folder = plan_.model_folder;
    auto& coordinator = plan_.coordinator.tables["coordinator"];
    if (!coordinator.contains("listen")) coordinator["listen"] = Quoted("127.0.0.1:0");
    coordinator["address_file"] = Quoted(Path("coordinator.address"));
    unlink(Path("coordinator.address").c_str());
    if (!coordinator.contains("ticket_key_file")) {
      coordinator["ticket_key_file"] = Quoted(Path("ticket_key.pem"));
    }
    const std::string secret = Path("cluster_secret");
    if (access(secret.c_str(), F_OK) != 0) {
      KVT_RETURN_IF_ERROR(WriteFile(secret, FreshSecret() + "\n"));
    }
    for (DaemonPlan& daemon : plan_.daemons) {
      auto& node = daemon.tables["node"];
      node["name"] = Quoted(daemon.name);
      if (!node.contains("listen")) node["listen"] = Quoted("127.0.0.1:0");
      if (daemon.kind == "store") continue;
      auto& tier = daemon.tables["tier"];
      if (!tier.contains("cluster_secret_file")) tier["cluster_secret_file"] = Quoted(secret);
      auto& model = daemon.tables["model"];
      model["folder"] = Quoted(plan_.model_folder);
      model["name"] = Quoted(plan_.model_name);
      if (!plan_.calibration.empty() && !model.contains("calibration")) {
        model["calibration"] = Quoted(plan_.calibration);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Launch(const DaemonPlan& daemon) {
    const std::string config = Path(daemon.name + ".toml");
    const std::string log = Path(daemon.name + ".log");
    KVT_RETURN_IF_ERROR(WriteFile(config, RenderConfig(daemon.tables)));
    unlink(log.c_str());
    KVT_ASSIGN_OR_RETURN(const ProcessId id,
                         Spawn({BinaryOf(daemon.kind), "--config", config}, log));
    state_.processes.push_back(RunProcess{.name = daemon.name,
                                          .kind = daemon.kind,
                                          .pid = id.pid,
                                          .start_ticks = id.start_ticks,
                                          .config_file = config,
                                          .log_file = log});
    return WriteRunState(cli_.run_dir, state_);
  }

  // Waits a little; an error when a daemon ended, on Ctrl-C, or at the deadline.
  absl::Status Step(const std::string& waiting_for) {
    std::vector<ProcessId> all;
    for (const RunProcess& process : state_.processes) all.push_back(IdOf(process));
    const int gone = WaitAnyGone(all, kPollInterval);
    if (gone >= 0) {
      const RunProcess& process = state_.processes[static_cast<size_t>(gone)];
      const std::string how = HowItEnded(static_cast<pid_t>(process.pid));
      return absl::InternalError(absl::StrCat(process.name, " ended while starting (", how,
                                              "); the end of ", process.log_file, ":\n",
                                              LastLines(process.log_file, kLogLines)));
    }
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGINT);
    sigaddset(&stop, SIGTERM);
    const timespec at_once{};
    if (sigtimedwait(&stop, nullptr, &at_once) > 0) return absl::CancelledError("interrupted");
    if (absl::Now() > deadline_) {
      return absl::DeadlineExceededError(absl::StrFormat(
          "not ready after %.0f s: %s; logs are in %s", seconds(), waiting_for, cli_.run_dir));
    }
    return absl::OkStatus();
  }

  absl::Status AwaitCoordinator() {
    while (true) {
      const auto text = ReadFile(Path("coordinator.address"));
      if (text.ok()) {
        state_.coordinator = std::string(absl::StripSuffix(*text, "\n"));
        KVT_RETURN_IF_ERROR(WriteRunState(cli_.run_dir, state_));
        Say(absl::StrCat("coordinator listens on ", state_.coordinator));
        return absl::OkStatus();
      }
      KVT_RETURN_IF_ERROR(Step("coordinator"));
    }
  }

  absl::Status AwaitDaemons() {
    const auto coordinator = ConnectCoordinator(state_.coordinator, kCallTimeout);
    std::set<std::string> waiting;
    for (const DaemonPlan& daemon : plan_.daemons) waiting.insert(daemon.name);
    Say(absl::StrCat("waiting for ", absl::StrJoin(waiting, ", ")));
    while (true) {
      const auto status = coordinator->Status();
      if (status.ok()) {
        for (const NodeStatus& node : status->nodes) {
          if (node.state == "starting" && IsOurs(node)) ShowStarting(node);
          if (node.state == "ready" && IsOurs(node) && waiting.erase(node.name) > 0) {
            Say(absl::StrCat(node.name, " is ready at ", node.control_address));
          }
        }
      }
      if (waiting.empty()) return absl::OkStatus();
      KVT_RETURN_IF_ERROR(Step(absl::StrJoin(waiting, ", ")));
    }
  }

  // A large arena takes longer than any fixed time: the deadline moves while there is progress.
  void ShowStarting(const NodeStatus& node) {
    StartingNode& known = starting_[node.name];
    const uint32_t percent = node.load.starting_percent;
    const absl::Time now = absl::Now();
    if (percent > known.percent) {
      known.percent = percent;
      deadline_ = std::max(deadline_, now + timeout_);
    } else if (known.told != absl::InfinitePast()) {
      return;
    }
    if (now - known.told < kTellStartingEvery) return;
    known.told = now;
    Say(absl::StrFormat("%s is starting: %d %% of its memory is ready", node.name, percent));
  }

  bool IsOurs(const NodeStatus& node) const {
    return std::any_of(
        state_.processes.begin(), state_.processes.end(), [&](const RunProcess& process) {
          return process.name == node.name && process.pid == node.pid;
        });
  }

  const Cli& cli_;
  ClusterPlan plan_;
  struct StartingNode {
    uint32_t percent = 0;
    absl::Time told = absl::InfinitePast();
  };

  const absl::Duration timeout_;
  const absl::Time began_;
  absl::Time deadline_;
  std::map<std::string, StartingNode> starting_;
  RunState state_;
  bool kept_ = false;
};

absl::Status CheckNotRunning(const std::string& run_dir) {
  const auto state = ReadRunState(run_dir);
  if (absl::IsNotFound(state.status())) return absl::OkStatus();
  if (!state.ok()) return state.status();
  for (const RunProcess& process : state->processes) {
    if (IsAlive(IdOf(process))) {
      return absl::AlreadyExistsError(absl::StrCat(
          "a cluster runs from ", run_dir, " already (", process.name, ", pid ", process.pid,
          "); stop it with `kvtide down --run-dir ", run_dir, "`"));
    }
  }
  return absl::OkStatus();
}

absl::Status Up(const Cli& given, const UpOptions& options, std::string* report) {
  KVT_ASSIGN_OR_RETURN(OptionsFile file, OptionsFile::Load(options.config));
  KVT_ASSIGN_OR_RETURN(ClusterPlan plan, ReadClusterPlan(file));
  std::error_code error;
  Cli cli = given;
  cli.run_dir = std::filesystem::absolute(given.run_dir, error).lexically_normal().string();
  std::filesystem::create_directories(cli.run_dir, error);
  if (chmod(cli.run_dir.c_str(), 0700) != 0) {
    return absl::PermissionDeniedError(absl::StrCat(cli.run_dir, ": ", std::strerror(errno)));
  }
  const int lock = open((cli.run_dir + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock < 0 || flock(lock, LOCK_EX | LOCK_NB) != 0) {
    if (lock >= 0) close(lock);
    return absl::AlreadyExistsError(
        absl::StrCat("another `kvtide up` is at work in ", cli.run_dir));
  }
  absl::Status status = CheckNotRunning(cli.run_dir);
  if (status.ok()) {
    const absl::Duration timeout =
        options.timeout > absl::ZeroDuration() ? options.timeout : plan.start_timeout;
    Start start(cli, std::move(plan), timeout);
    status = start.Run();
    if (status.ok()) {
      const RunState& state = start.state();
      if (cli.json) {
        nlohmann::json all = {{"coordinator", state.coordinator},
                              {"run_dir", cli.run_dir},
                              {"seconds", start.seconds()},
                              {"processes", nlohmann::json::array()}};
        for (const RunProcess& process : state.processes) {
          all["processes"].push_back(
              {{"name", process.name}, {"kind", process.kind}, {"pid", process.pid}});
        }
        *report = all.dump(2);
      } else {
        *report = absl::StrFormat("cluster %s is ready: %d processes, coordinator %s, %.1f s",
                                  state.name, state.processes.size(), state.coordinator,
                                  start.seconds());
      }
    }
  }
  close(lock);
  return status;
}

}  // namespace

int RunUp(const Cli& cli, const UpOptions& options) {
  std::string report;
  const absl::Status status = Up(cli, options, &report);
  if (absl::IsCancelled(status)) {
    Fail(cli, status);
    return kExitInterrupted;
  }
  if (!status.ok()) return Fail(cli, status);
  std::printf("%s\n", report.c_str());
  return kExitOk;
}

int RunDown(const Cli& cli, const DownOptions& options) {
  const auto state = ReadRunState(cli.run_dir);
  if (absl::IsNotFound(state.status())) {
    return Fail(cli, absl::UnavailableError(absl::StrCat("no cluster runs from ", cli.run_dir)));
  }
  if (!state.ok()) return Fail(cli, state.status());
  StopReport all;
  // Those who use the others first.
  const std::vector<std::set<std::string>> order = {
      {"prefill", "decode"}, {"store"}, {"coordinator"}};
  const absl::Time deadline = absl::Now() + options.grace;
  for (const std::set<std::string>& kinds : order) {
    std::vector<ProcessId> ids;
    for (const RunProcess& process : state->processes) {
      if (kinds.contains(process.kind)) ids.push_back(IdOf(process));
    }
    const StopReport some =
        StopAll(ids, std::max(deadline - absl::Now(), absl::Milliseconds(500)));
    all.terminated += some.terminated;
    all.killed += some.killed;
    all.gone += some.gone;
  }
  unlink(StateFile(cli.run_dir).c_str());
  if (cli.json) {
    const nlohmann::json report = {
        {"terminated", all.terminated}, {"killed", all.killed}, {"had_ended", all.gone}};
    std::printf("%s\n", report.dump(2).c_str());
  } else {
    std::printf("stopped: %d ended on request, %d killed, %d had ended before\n", all.terminated,
                all.killed, all.gone);
  }
  return all.killed == 0 ? kExitOk : kExitFailed;
}

}  // namespace kvt::ctl
