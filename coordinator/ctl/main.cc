// kvtide: the command line of a cluster.
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "coordinator/ctl/cli.h"
#include "coordinator/ctl/doctor.h"
#include "coordinator/ctl/generate.h"
#include "coordinator/ctl/show.h"
#include "coordinator/ctl/up.h"

namespace kvt::ctl {
namespace {

constexpr char kFooter[] = R"(Exit codes:
  0    done
  1    the operation, or an admitted request, failed
  2    bad command line, configuration or input
  3    the cluster is not running or not reachable
  4    refused: the cluster cannot take it now
  130  interrupted (generate: the request was cancelled)

Where the cluster is: --coordinator HOST:PORT, or the run directory of `kvtide up`
(--run-dir, else $KVTIDE_RUN_DIR, else ./var/run/kvtide).

Examples:
  kvtide doctor --config deploy/quickstart.toml
  kvtide up --config deploy/quickstart.toml
  kvtide generate --chat "What is a KV cache?"
  kvtide generate --file prompt.txt --max-tokens 64 -o json
  kvtide tier
  kvtide tier purge --tenant NAME
  kvtide down)";

void AddSampling(CLI::App* command, GenerateOptions* options) {
  command->add_option("--max-tokens", options->max_tokens,
                      "most output tokens; cut to what the context has room for")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--temperature", options->temperature, "0: greedy")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-k", options->top_k, "sample among so many; 0: all")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command->add_option("--top-p", options->top_p, "sample among this share of probability")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "tokens depend on seed and position alone")
      ->capture_default_str();
  command->add_flag("--ignore-eos", options->ignore_eos, "go on until --max-tokens");
}

CLI::App* AddGenerate(CLI::App& app, GenerateOptions* options) {
  CLI::App* command = app.add_subcommand(
      "generate", "Answer a prompt through the cluster, streaming; Ctrl-C cancels");
  command->add_option("prompt", options->text, "the prompt; without it: --file or stdin");
  command->add_option("--file,-f", options->file, "read the prompt from FILE; -: stdin");
  command->add_flag("--chat", options->chat, "the prompt is a user's turn of a conversation");
  command->add_option("--system", options->system,
                      "with --chat: the system message instead of the model's own");
  command->add_option("--model", options->model, "model to ask; default: the only one served");
  command->add_option("--model-folder", options->model_folder,
                      "folder of the tokenizer; default: the cluster's model folder");
  command->add_option("--tenant", options->tenant, "sharing domain; default: shared");
  command->add_option("--fidelity", options->fidelity,
                      "exact, elastic or sparse; default: the tenant's")
      ->capture_default_str();
  AddSampling(command, options);
  command->add_flag("--quiet,-q", options->quiet, "do not print the figures");
  return command;
}

// Becomes kvtide-`tool`, which stands beside this program.
int ExecTool(const Cli& cli, const std::string& tool, const std::vector<std::string>& arguments) {
  const std::string program = ProgramFolder() + "/kvtide-" + tool;
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(program.c_str(), argv.data());
  return Fail(cli, absl::NotFoundError(absl::StrCat(program, ": ", std::strerror(errno))));
}

// What the command line can say, and where each part of it went.
struct Commands {
  Cli cli;
  std::string output = "table";
  UpOptions up_options;
  int up_timeout_s = 0;
  DownOptions down_options;
  int down_timeout_s = 25;
  DoctorOptions doctor_options;
  RequestsOptions requests_options;
  GenerateOptions generate_options;
  CLI::App* up = nullptr;
  CLI::App* down = nullptr;
  CLI::App* doctor = nullptr;
  CLI::App* status = nullptr;
  CLI::App* nodes = nullptr;
  CLI::App* tier = nullptr;
  CLI::App* purge = nullptr;
  PurgeOptions purge_options;
  CLI::App* requests = nullptr;
  CLI::App* generate = nullptr;
};

void AddCommands(CLI::App& app, Commands* all) {
  all->cli.run_dir = DefaultRunDir();
  app.add_option("--coordinator", all->cli.coordinator, "HOST:PORT of the coordinator");
  app.add_option("--run-dir", all->cli.run_dir, "run directory of `kvtide up`")
      ->capture_default_str();
  app.add_option("--output,-o", all->output, "table (for people) or json")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  all->up = app.add_subcommand("up", "Start a local cluster from one file, wait until it is ready");
  all->up->add_option("--config", all->up_options.config, "cluster file, as deploy/quickstart.toml")
      ->required();
  all->up->add_option("--timeout", all->up_timeout_s, "seconds until ready; default: the file's")
      ->check(CLI::Range(1, 24 * 3600));
  all->down = app.add_subcommand("down", "Stop the local cluster of the run directory");
  all->down->add_option("--timeout", all->down_timeout_s, "seconds until processes are killed")
      ->check(CLI::Range(0, 3600))
      ->capture_default_str();
  all->doctor = app.add_subcommand(
      "doctor", "What of this host would keep a cluster from starting or from working well");
  all->doctor->add_option("--config", all->doctor_options.config,
                          "cluster file, as for `up`; without it: a store with defaults");
  all->status = app.add_subcommand("status", "Nodes, requests and the latest events");
  all->nodes = app.add_subcommand("nodes", "Stores and workers, dead ones included");
  all->tier = app.add_subcommand(
      "tier", "What lies in the stores, per node and in sum, by medium and plane");
  all->tier->require_subcommand(0, 1);
  all->purge = all->tier->add_subcommand(
      "purge", "Remove everything of a tenant from the memory and the disk of every store");
  all->purge->add_option("--tenant", all->purge_options.tenant,
                         "the tenant; an empty name is what all share")
      ->required();
  all->purge->add_option("--wait", all->purge_options.wait_s, "seconds for each store's disk")
      ->check(CLI::Range(1, 300))
      ->capture_default_str();
  all->requests =
      app.add_subcommand("requests", "Running requests, then the finished, latest first");
  all->requests->add_option("--limit", all->requests_options.limit, "finished ones shown; 0: all")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  all->generate = AddGenerate(app, &all->generate_options);
  app.add_subcommand("run", "Run the model in this process, without a cluster (kvtide run --help)");
  app.add_subcommand("calibrate",
                     "Find the selecting heads of a model (kvtide calibrate --help)");
}

int Dispatch(Commands& all) {
  Cli& cli = all.cli;
  cli.json = all.output == "json";
  if (*all.up) {
    all.up_options.timeout = absl::Seconds(all.up_timeout_s);
    // Ctrl-C is asked for between steps, so that what was started is stopped.
    sigset_t stop;
    sigemptyset(&stop);
    sigaddset(&stop, SIGINT);
    sigaddset(&stop, SIGTERM);
    sigprocmask(SIG_BLOCK, &stop, nullptr);
    return RunUp(cli, all.up_options);
  }
  if (*all.down) {
    all.down_options.grace = absl::Seconds(all.down_timeout_s);
    return RunDown(cli, all.down_options);
  }
  if (*all.doctor) return RunDoctor(cli, all.doctor_options);
  if (*all.status) return RunStatus(cli);
  if (*all.nodes) return RunNodes(cli);
  if (*all.purge) return RunTierPurge(cli, all.purge_options);
  if (*all.tier) return RunTier(cli);
  if (*all.requests) return RunRequests(cli, all.requests_options);
  all.generate_options.has_text = all.generate->count("prompt") > 0;
  all.generate_options.has_system = all.generate->count("--system") > 0;
  return RunGenerate(cli, all.generate_options);
}

int Main(int argc, char** argv) {
  // Everything behind `run` is kvtide-run's, and likewise `calibrate`.
  for (const char* tool : {"run", "calibrate"}) {
    if (argc >= 2 && std::strcmp(argv[1], tool) == 0) {
      return ExecTool(Cli{}, tool, std::vector<std::string>(argv + 2, argv + argc));
    }
  }
  CLI::App app{"kvtide: a multi-node KV tier for long-context language models"};
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();
  Commands all;
  AddCommands(app, &all);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitOk : kExitBadInput;
  }
  return Dispatch(all);
}

}  // namespace
}  // namespace kvt::ctl

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  return kvt::ctl::Main(argc, argv);
}
