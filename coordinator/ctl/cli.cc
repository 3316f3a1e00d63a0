#include "coordinator/ctl/cli.h"

#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "coordinator/ctl/run_state.h"
#include "kernels/base/check.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt::ctl {

absl::StatusOr<std::string> Cli::CoordinatorAddress() const {
  if (!coordinator.empty()) return coordinator;
  const absl::StatusOr<RunState> state = ReadRunState(run_dir);
  if (absl::IsNotFound(state.status())) {
    return absl::UnavailableError(
        absl::StrCat("no cluster runs from ", run_dir, " (", StateFile(run_dir),
                     " is missing): start one with `kvtide up`, or give --coordinator or --run-dir"));
  }
  if (!state.ok()) return state.status();
  if (state->coordinator.empty()) {
    return absl::UnavailableError(absl::StrCat("the cluster of ", run_dir, " is starting"));
  }
  return state->coordinator;
}

absl::StatusOr<std::unique_ptr<CoordinatorApi>> Cli::Connect() const {
  KVT_ASSIGN_OR_RETURN(const std::string address, CoordinatorAddress());
  return ConnectCoordinator(address, kCallTimeout);
}

std::string DefaultRunDir() {
  const char* given = std::getenv("KVTIDE_RUN_DIR");
  return given != nullptr && *given != '\0' ? given : "var/run/kvtide";
}

std::string ProgramFolder() {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof path);
  KVT_CHECK(size > 0);
  const std::string whole(path, static_cast<size_t>(size));
  return whole.substr(0, whole.rfind('/'));
}

int ExitCode(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk: return kExitOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied: return kExitBadInput;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded: return kExitNoCluster;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kResourceExhausted: return kExitRefused;
    case absl::StatusCode::kCancelled: return kExitInterrupted;
    default: return kExitFailed;
  }
}

std::string CodeName(absl::StatusCode code) { return absl::StatusCodeToString(code); }

int Fail(const Cli& cli, const absl::Status& status) {
  const std::string message(status.message());
  if (cli.json) {
    const nlohmann::json error = {
        {"error", {{"code", CodeName(status.code())}, {"message", message}}}};
    // Replaces what is not UTF-8: a message may quote input.
    std::printf("%s\n",
                error.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    std::fprintf(stderr, "kvtide: %s\n", message.c_str());
  }
  return ExitCode(status);
}

}  // namespace kvt::ctl
