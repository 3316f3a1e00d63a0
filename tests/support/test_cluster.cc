#include "tests/support/test_cluster.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/ctl/process.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(5);
constexpr absl::Duration kPoll = absl::Milliseconds(20);
constexpr int kLogLines = 15;
constexpr absl::string_view kSleeps = "voluntary_ctxt_switches:";  // in /proc/PID/task/TID/status

int RunKvtide(const std::string& arguments, const std::string& log) {
  const std::string command =
      absl::StrCat(KVT_BINARY_DIR, "/bin/kvtide ", arguments, " >", log, " 2>&1");
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string ClusterFile(const ClusterSpec& spec) {
  const std::string ucx = "ucx_net_devices = \"lo\"\nucx_tls = \"tcp\"\n";
  return absl::StrCat(
      "[cluster]\nmodel_folder = \"", spec.model_folder, "\"\nmodel_name = \"test\"\n",
      "start_timeout = \"60s\"\n[coordinator]\n", spec.coordinator_keys, "[tier]\ntransport = \"",
      spec.transport, "\"\n", ucx, spec.tier_keys, "[model]\n", spec.model_keys,
      "[[store]]\ncount = ", spec.stores, "\n", ucx, spec.store_keys, "[[prefill]]\ncount = ",
      spec.prefills, "\n", spec.prefill_keys, "[[decode]]\ncount = ", spec.decodes, "\n",
      spec.decode_keys);
}

}  // namespace

absl::Status Await(absl::Duration timeout, const std::function<absl::Status()>& done) {
  const absl::Time deadline = RealClock::Get().Now() + timeout;
  while (true) {
    absl::Status status = done();
    if (status.ok() || RealClock::Get().Now() >= deadline) return status;
    absl::SleepFor(kPoll);
  }
}

ctl::GenerateRequest Request(std::vector<int32_t> tokens, uint32_t output_tokens_max) {
  ctl::GenerateRequest request;
  request.tokens = std::move(tokens);
  request.output_tokens_max = output_tokens_max;
  return request;
}

absl::StatusOr<std::unique_ptr<TestCluster>> TestCluster::Start(const ClusterSpec& spec) {
  std::unique_ptr<TestCluster> cluster(new TestCluster());
  const std::string& dir = cluster->folder_.path();
  cluster->folder_.Write("cluster.toml", ClusterFile(spec));
  const int code = RunKvtide(absl::StrCat("up --config ", dir, "/cluster.toml --run-dir ", dir),
                             dir + "/up.log");
  if (code != 0) {
    return absl::InternalError(absl::StrCat("kvtide up: exit code ", code, "\n",
                                            ReadAll(dir + "/up.log"), cluster->Logs()));
  }
  KVT_ASSIGN_OR_RETURN(cluster->state_, ctl::ReadRunState(dir));
  cluster->coordinator_ = ConnectCoordinator(cluster->state_.coordinator, kCallTimeout);
  return cluster;
}

TestCluster::~TestCluster() {
  if (state_.processes.empty()) return;
  (void)RunKvtide(absl::StrCat("down --run-dir ", run_dir()), run_dir() + "/down.log");
}

std::string TestCluster::Logs() const {
  std::string all;
  for (const auto& entry : std::filesystem::directory_iterator(run_dir())) {
    if (entry.path().extension() != ".log") continue;
    std::vector<std::string> lines;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    absl::StrAppend(&all, "--- ", entry.path().filename().string(), "\n");
    const size_t from = lines.size() > kLogLines ? lines.size() - kLogLines : 0;
    for (size_t i = from; i < lines.size(); ++i) absl::StrAppend(&all, lines[i], "\n");
  }
  return all;
}

std::unique_ptr<ctl::GenerateSession> TestCluster::NewSession() {
  ctl::WorkerConnector connect;
  connect.prefill = [](absl::string_view at) { return ConnectPrefill(at, kCallTimeout); };
  connect.decode = [](absl::string_view at) { return ConnectDecode(at, kCallTimeout); };
  return std::make_unique<ctl::GenerateSession>(*coordinator_, connect, RealClock::Get());
}

GenerateOutcome TestCluster::Generate(ctl::GenerateRequest request,
                                      const ctl::TokenConsumer& consumer) {
  if (request.model.empty()) request.model = state_.model_name;
  GenerateOutcome outcome;
  outcome.status = NewSession()->Run(request, consumer, &outcome.result);
  return outcome;
}

std::vector<GenerateOutcome> TestCluster::GenerateAll(std::vector<ctl::GenerateRequest> requests) {
  std::vector<GenerateOutcome> outcomes(requests.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < requests.size(); ++i) {
    threads.emplace_back([&, i] { outcomes[i] = Generate(std::move(requests[i])); });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

pid_t TestCluster::Pid(const std::string& name) const {
  for (const ctl::RunProcess& process : state_.processes) {
    if (process.name == name) return static_cast<pid_t>(process.pid);
  }
  KVT_CHECK(false, "no daemon ", name);
  return 0;
}

pid_t TestCluster::Signal(const std::string& name, int signal) {
  const pid_t pid = Pid(name);
  KVT_CHECK(kill(pid, signal) == 0, name);
  return pid;
}

absl::Status TestCluster::Restart(const std::string& name) {
  for (ctl::RunProcess& process : state_.processes) {
    if (process.name != name) continue;
    const ctl::ProcessId old{static_cast<pid_t>(process.pid), process.start_ticks};
    KVT_RETURN_IF_ERROR(Await(kCallTimeout, [&] {
      return ctl::IsAlive(old) ? absl::FailedPreconditionError(absl::StrCat(name, " runs"))
                               : absl::OkStatus();
    }));
    KVT_ASSIGN_OR_RETURN(
        const ctl::ProcessId started,
        ctl::Spawn({absl::StrCat(KVT_BINARY_DIR, "/bin/kvtide-", process.kind), "--config",
                    process.config_file},
                   process.log_file));
    process.pid = started.pid;
    process.start_ticks = started.start_ticks;
    return ctl::WriteRunState(run_dir(), state_);  // `down` stops it
  }
  return absl::NotFoundError(name);
}

std::vector<std::string> TestCluster::NamesOf(const std::string& kind) const {
  std::vector<std::string> names;
  for (const ctl::RunProcess& process : state_.processes) {
    if (process.kind == kind) names.push_back(process.name);
  }
  return names;
}

absl::StatusOr<NodeStatus> TestCluster::Node(const std::string& name) {
  KVT_ASSIGN_OR_RETURN(const ClusterStatus status, coordinator_->Status());
  for (const NodeStatus& node : status.nodes) {
    if (node.name == name) return node;
  }
  return absl::NotFoundError(name);
}

absl::StatusOr<StoreStats> TestCluster::Stats(const std::string& store) {
  KVT_ASSIGN_OR_RETURN(const NodeStatus node, Node(store));
  return ConnectStore(node.control_address, kCallTimeout)->Stats();
}

StoreStats TestCluster::TotalStats() {
  StoreStats sum;
  for (const std::string& name : NamesOf("store")) {
    const absl::StatusOr<NodeStatus> node = Node(name);
    if (!node.ok() || node->state == "dead") continue;
    const absl::StatusOr<StoreStats> stats = Stats(name);
    if (!stats.ok()) continue;
    sum.pins += stats->pins;
    sum.pinned_blocks += stats->pinned_blocks;
    sum.in_flight += stats->in_flight;
    sum.reserved_bytes += stats->reserved_bytes;
    sum.writing_bytes += stats->writing_bytes;
    sum.output_reserved_blocks += stats->output_reserved_blocks;
    sum.tickets += stats->tickets;
    sum.blocks += stats->blocks;
    sum.pulled_bytes += stats->pulled_bytes;
    sum.pushed_bytes += stats->pushed_bytes;
    sum.checksum_failures += stats->checksum_failures;
  }
  return sum;
}

absl::Status TestCluster::AwaitNothingHeld(absl::Duration timeout) {
  return Await(timeout, [this]() -> absl::Status {
    const StoreStats sum = TotalStats();
    if (sum.pins + sum.in_flight + sum.reserved_bytes + sum.writing_bytes +
            sum.output_reserved_blocks + sum.tickets >
        0) {
      return absl::DeadlineExceededError(absl::StrCat(
          "the stores hold ", sum.pins, " pins, ", sum.in_flight, " in flight, ",
          sum.reserved_bytes, " reserved and ", sum.writing_bytes, " writing bytes, ",
          sum.output_reserved_blocks, " output blocks, ", sum.tickets, " tickets"));
    }
    KVT_ASSIGN_OR_RETURN(const ClusterStatus status, coordinator_->Status());
    for (const NodeStatus& node : status.nodes) {
      if (node.kind == NodeKind::kStore || node.state == "dead") continue;
      if (node.load.slots_free != node.load.slots_total) {
        return absl::DeadlineExceededError(absl::StrCat(node.name, " has ", node.load.slots_free,
                                                        " of ", node.load.slots_total,
                                                        " slots free"));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status TestCluster::AwaitState(const std::string& name, const std::string& state,
                                     absl::Duration timeout) {
  return Await(timeout, [&]() -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const NodeStatus node, Node(name));
    if (node.state == state) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(name, " is ", node.state));
  });
}

std::vector<ProcessorUse> TestCluster::ProcessorUseNow() const {
  std::vector<ProcessorUse> uses;
  for (const ctl::RunProcess& process : state_.processes) {
    ProcessorUse use;
    use.name = process.name;
    clockid_t clock = 0;
    timespec used{};
    // In nanoseconds, with the threads that have ended; /proc/PID/stat counts in hundredths of a second.
    if (clock_getcpuclockid(static_cast<pid_t>(process.pid), &clock) == 0 &&
        clock_gettime(clock, &used) == 0) {
      use.processor = absl::DurationFromTimespec(used);
    }
    std::error_code gone;
    const std::string tasks = absl::StrCat("/proc/", process.pid, "/task");
    for (const auto& task : std::filesystem::directory_iterator(tasks, gone)) {
      std::stringstream status(ReadAll(task.path().string() + "/status"));
      for (std::string line; std::getline(status, line);) {
        if (!absl::StartsWith(line, kSleeps)) continue;
        int64_t sleeps = 0;
        if (absl::SimpleAtoi(line.substr(kSleeps.size()), &sleeps)) use.sleeps += sleeps;
      }
    }
    uses.push_back(std::move(use));
  }
  return uses;
}

}  // namespace kvt
