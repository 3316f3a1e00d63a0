// A real local cluster for tests: the daemons themselves, started by `kvtide up` in a folder of its
// own on free ports, and requests as a front end runs them. Everything it started is gone when it is.
//
// Used by one thread; Generate may be called by several.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/ctl/generate_session.h"
#include "coordinator/ctl/run_state.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/store_api.h"
#include "tests/support/model_folder.h"

namespace kvt {

struct ClusterSpec {
  std::string model_folder;
  int stores = 2;
  int prefills = 1;
  int decodes = 2;
  std::string transport = "ucx";  // or "shm"
  // More lines of the tables, "key = value\n".
  std::string coordinator_keys;
  std::string tier_keys;
  std::string model_keys;
  std::string store_keys = "arena_bytes = \"256MiB\"\n";
  // What is stored is fetched, however slow the machine is now: tests count tokens.
  std::string prefill_keys = "slots_bytes = \"256MiB\"\nfetch_planner = false\n";
  std::string decode_keys = "slots_bytes = \"256MiB\"\n";
};

struct GenerateOutcome {
  absl::Status status;
  ctl::GenerateResult result;
};

struct ProcessorUse {
  std::string name;
  absl::Duration processor;
  int64_t sleeps = 0;  // how often its threads went to sleep; each was woken once for it
};

// Greedy, with the model's name, unless said otherwise.
ctl::GenerateRequest Request(std::vector<int32_t> tokens, uint32_t output_tokens_max);

class TestCluster {
 public:
  static absl::StatusOr<std::unique_ptr<TestCluster>> Start(const ClusterSpec& spec);
  ~TestCluster();

  [[nodiscard]] CoordinatorApi& coordinator() { return *coordinator_; }
  [[nodiscard]] const std::string& run_dir() const { return folder_.path(); }
  // The last lines of every daemon's log, for a failing test's message.
  [[nodiscard]] std::string Logs() const;

  GenerateOutcome Generate(ctl::GenerateRequest request,
                           const ctl::TokenConsumer& consumer = [](int32_t) {});
  // All at once, one thread each.
  std::vector<GenerateOutcome> GenerateAll(std::vector<ctl::GenerateRequest> requests);
  // A session of its own, for tests that cancel.
  std::unique_ptr<ctl::GenerateSession> NewSession();
  [[nodiscard]] const std::string& model() const { return state_.model_name; }

  // Sends `signal` to the daemon of that name. Its pid.
  pid_t Signal(const std::string& name, int signal);
  // Starts a daemon that has ended again, with the configuration it had.
  absl::Status Restart(const std::string& name);
  [[nodiscard]] pid_t Pid(const std::string& name) const;
  [[nodiscard]] std::vector<std::string> NamesOf(const std::string& kind) const;
  // NotFound when the coordinator does not know it.
  absl::StatusOr<NodeStatus> Node(const std::string& name);
  absl::StatusOr<StoreStats> Stats(const std::string& store);
  // The sum over the stores that answer.
  StoreStats TotalStats();
  // Waits until no store holds a pin, a reservation or a transfer, and every worker's slots are
  // free. DeadlineExceeded says what is left.
  absl::Status AwaitNothingHeld(absl::Duration timeout);
  // Waits until the coordinator shows the node in that state.
  absl::Status AwaitState(const std::string& name, const std::string& state,
                          absl::Duration timeout);
  // Of every daemon, since it started.
  [[nodiscard]] std::vector<ProcessorUse> ProcessorUseNow() const;

 private:
  TestCluster() = default;

  TempFolder folder_;
  ctl::RunState state_;
  std::unique_ptr<CoordinatorApi> coordinator_;
};

// Polls `done` until it returns OK or `timeout`; its last answer.
absl::Status Await(absl::Duration timeout, const std::function<absl::Status()>& done);

}  // namespace kvt
