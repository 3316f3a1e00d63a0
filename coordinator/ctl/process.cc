#include "coordinator/ctl/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

extern char** environ;

namespace kvt::ctl {
namespace {

constexpr size_t kLogTailBytes = 4096;
constexpr absl::Duration kAfterKill = absl::Seconds(1);

int OpenPidFd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

std::vector<ProcessId> Alive(const std::vector<ProcessId>& processes) {
  std::vector<ProcessId> alive;
  std::copy_if(processes.begin(), processes.end(), std::back_inserter(alive), IsAlive);
  return alive;
}

void WaitAllGone(const std::vector<ProcessId>& processes, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (std::vector<ProcessId> left = Alive(processes); !left.empty(); left = Alive(left)) {
    const absl::Duration rest = deadline - absl::Now();
    if (rest <= absl::ZeroDuration()) return;
    WaitAnyGone(left, rest);
    for (const ProcessId& process : left) waitpid(process.pid, nullptr, WNOHANG);
  }
}

}  // namespace

absl::StatusOr<ProcessId> Spawn(const std::vector<std::string>& arguments,
                                const std::string& log_file) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                   0600);
  posix_spawn_file_actions_adddup2(&files, 1, 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  sigset_t ours;
  sigemptyset(&ours);
  for (const int signal : {SIGINT, SIGTERM, SIGPIPE}) sigaddset(&ours, signal);
  posix_spawnattr_setsigdefault(&attributes, &ours);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK |
                                            POSIX_SPAWN_SETSIGDEF);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0], &files, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot start ", arguments.front(), ": ", std::strerror(error)));
  }
  return ProcessId{pid, StartTicks(pid)};
}

uint64_t StartTicks(pid_t pid) {
  std::ifstream in(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(in, text);
  // The second field is the name in parentheses, which may hold anything.
  const size_t close = text.rfind(')');
  if (close == std::string::npos) return 0;
  std::istringstream rest(text.substr(close + 1));
  std::string field;
  rest >> field;
  if (field == "Z" || field == "X") return 0;
  for (int i = 4; i <= 22; ++i) rest >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

bool IsAlive(const ProcessId& process) {
  const uint64_t ticks = StartTicks(process.pid);
  return ticks != 0 && ticks == process.start_ticks;
}

int WaitAnyGone(const std::vector<ProcessId>& processes, absl::Duration timeout) {
  std::vector<pollfd> watched;
  int gone = -1;
  for (size_t i = 0; i < processes.size() && gone < 0; ++i) {
    const int fd = OpenPidFd(processes[i].pid);
    if (!IsAlive(processes[i])) gone = static_cast<int>(i);
    watched.push_back(pollfd{.fd = fd, .events = POLLIN, .revents = 0});
  }
  if (gone < 0) {
    const int64_t ms = std::max<int64_t>(0, absl::ToInt64Milliseconds(timeout));
    poll(watched.data(), watched.size(), static_cast<int>(std::min<int64_t>(ms, 1 << 30)));
    for (size_t i = 0; i < watched.size() && gone < 0; ++i) {
      if (watched[i].revents != 0) gone = static_cast<int>(i);
    }
  }
  for (const pollfd& entry : watched) {
    if (entry.fd >= 0) close(entry.fd);
  }
  return gone;
}

StopReport StopAll(const std::vector<ProcessId>& processes, absl::Duration grace) {
  StopReport report;
  const std::vector<ProcessId> alive = Alive(processes);
  report.gone = static_cast<int>(processes.size() - alive.size());
  for (const ProcessId& process : alive) kill(process.pid, SIGTERM);
  WaitAllGone(alive, grace);
  const std::vector<ProcessId> left = Alive(alive);
  for (const ProcessId& process : left) kill(process.pid, SIGKILL);
  WaitAllGone(left, kAfterKill);
  report.killed = static_cast<int>(left.size());
  report.terminated = static_cast<int>(alive.size() - left.size());
  return report;
}

std::string HowItEnded(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, WNOHANG) != child) return "ended";
  if (WIFSIGNALED(status)) return absl::StrCat("signal ", strsignal(WTERMSIG(status)));
  return absl::StrCat("exit code ", WEXITSTATUS(status));
}

std::string LastLines(const std::string& path, int lines) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return "";
  const std::streamoff size = in.tellg();
  in.seekg(std::max<std::streamoff>(0, size - static_cast<std::streamoff>(kLogTailBytes)));
  std::ostringstream all;
  all << in.rdbuf();
  std::string text = all.str();
  while (!text.empty() && text.back() == '\n') text.pop_back();
  size_t at = text.size();
  for (int i = 0; i < lines && at != std::string::npos && at > 0; ++i) {
    at = text.rfind('\n', at - 1);
  }
  return at == std::string::npos || at == 0 ? text : text.substr(at + 1);
}

}  // namespace kvt::ctl
