#include "coordinator/ctl/run_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt::ctl {

using nlohmann::json;

std::string StateFile(const std::string& run_dir) { return run_dir + "/cluster.json"; }

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    const std::string message = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::PermissionDeniedError(message);
  }
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".new";
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  bool good = fd >= 0;
  for (size_t at = 0; good && at < text.size();) {
    const ssize_t wrote = write(fd, text.data() + at, text.size() - at);
    good = wrote > 0;
    at += good ? static_cast<size_t>(wrote) : 0;
  }
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!good) return absl::UnavailableError(absl::StrCat(temporary, ": ", std::strerror(error)));
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::StatusOr<RunState> ReadRunState(const std::string& run_dir) {
  const std::string path = StateFile(run_dir);
  KVT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const json all = json::parse(text, nullptr, false);
  const auto bad = [&] {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a cluster state of `kvtide up`"));
  };
  if (!all.is_object() || !all.contains("processes") || !all["processes"].is_array()) return bad();
  const auto text_of = [](const json& object, const char* key) {
    return object.contains(key) && object[key].is_string() ? object[key].get<std::string>() : "";
  };
  RunState state;
  state.name = text_of(all, "name");
  state.coordinator = text_of(all, "coordinator");
  state.model_name = text_of(all, "model_name");
  state.model_folder = text_of(all, "model_folder");
  for (const json& entry : all["processes"]) {
    if (!entry.is_object() || !entry.contains("pid") || !entry["pid"].is_number_integer() ||
        !entry.contains("start_ticks") || !entry["start_ticks"].is_number_integer()) {
      return bad();
    }
    RunProcess process;
    process.name = text_of(entry, "name");
    process.kind = text_of(entry, "kind");
    process.pid = entry["pid"].get<int64_t>();
    process.start_ticks = entry["start_ticks"].get<uint64_t>();
    process.config_file = text_of(entry, "config_file");
    process.log_file = text_of(entry, "log_file");
    if (process.pid <= 1) return bad();
    state.processes.push_back(std::move(process));
  }
  return state;
}

absl::Status WriteRunState(const std::string& run_dir, const RunState& state) {
  json all = {{"name", state.name},
              {"coordinator", state.coordinator},
              {"model_name", state.model_name},
              {"model_folder", state.model_folder},
              {"processes", json::array()}};
  for (const RunProcess& process : state.processes) {
    all["processes"].push_back({{"name", process.name},
                                {"kind", process.kind},
                                {"pid", process.pid},
                                {"start_ticks", process.start_ticks},
                                {"config_file", process.config_file},
                                {"log_file", process.log_file}});
  }
  return WriteFile(StateFile(run_dir), all.dump(2) + "\n");
}

}  // namespace kvt::ctl
