#include "tests/bench/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "tests/bench/bench_store.h"

namespace kvt {
namespace {

constexpr absl::Duration kAnswerTimeout = absl::Seconds(120);

}  // namespace

double WaitedSeconds(pid_t pid) {
  double seconds = 0;
  std::error_code none;
  for (const auto& task :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"), none)) {
    std::ifstream in(task.path() / "schedstat");
    double run_ns = 0;
    double waited_ns = 0;
    if (in >> run_ns >> waited_ns) seconds += waited_ns * 1e-9;
  }
  return seconds;
}

void BindProcess(pid_t pid, int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (cpu < 0 || i == cpu) CPU_SET(i, &cpus);
  }
  std::error_code none;
  for (const auto& task :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"), none)) {
    int tid = 0;
    if (absl::SimpleAtoi(task.path().filename().string(), &tid)) {
      (void)sched_setaffinity(tid, sizeof(cpus), &cpus);
    }
  }
}

PeerProcess::PeerProcess(const std::vector<std::string>& command,
                         const std::vector<std::pair<std::string, std::string>>& environment) {
  int in[2];
  int out[2];
  KVT_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
  pid_ = fork();
  KVT_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    (void)setpgid(0, 0);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)dup2(in[0], STDIN_FILENO);
    (void)dup2(out[1], STDOUT_FILENO);
    for (const auto& [name, value] : environment) {
      if (value.empty()) {
        unsetenv(name.c_str());
      } else {
        setenv(name.c_str(), value.c_str(), 1);
      }
    }
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  (void)setpgid(pid_, pid_);
  close(in[0]);
  close(out[1]);
  in_ = in[1];
  out_ = out[0];
  const absl::StatusOr<std::string> line = ReadLine(kAnswerTimeout);
  if (!line.ok()) {
    status_ = line.status();
    return;
  }
  const std::vector<std::string> words = absl::StrSplit(*line, ' ');
  if (words.size() != 3 || words[0] != "ready" || !absl::SimpleAtoi(words[2], &target_)) {
    status_ = absl::UnavailableError(absl::StripPrefix(*line, "failed "));
  }
}

PeerProcess::~PeerProcess() {
  close(in_);
  close(out_);
  (void)kill(-pid_, SIGCONT);
  (void)kill(-pid_, SIGKILL);  // its own group: the driver and what it started
  (void)waitpid(pid_, nullptr, 0);
}

absl::StatusOr<std::string> PeerProcess::ReadLine(absl::Duration timeout) {
  const absl::Time deadline = RealClock::Get().Now() + timeout;
  std::string line;
  while (true) {
    pollfd ready{out_, POLLIN, 0};
    const absl::Duration left = deadline - RealClock::Get().Now();
    if (left <= absl::ZeroDuration()) return absl::DeadlineExceededError("no answer in time");
    if (poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) continue;
    char c = 0;
    if (read(out_, &c, 1) != 1) return absl::UnavailableError("the driver ended");
    if (c == '\n') return line;
    line.push_back(c);
  }
}

absl::StatusOr<std::string> PeerProcess::Ask(const std::string& line) {
  if (!status_.ok()) return status_;
  const std::string text = line + "\n";
  absl::StatusOr<std::string> answer = absl::UnavailableError("the driver ended");
  if (write(in_, text.data(), text.size()) == static_cast<ssize_t>(text.size())) {
    answer = ReadLine(kAnswerTimeout);
  }
  if (answer.ok() && absl::StartsWith(*answer, "failed")) {
    answer = absl::InternalError(absl::StripPrefix(*answer, "failed "));
  }
  if (!answer.ok()) status_ = answer.status();
  return answer;
}

absl::StatusOr<double> PeerProcess::Run() {
  KVT_ASSIGN_OR_RETURN(const std::string answer, Ask("run"));
  double seconds = 0;
  if (!absl::SimpleAtod(answer, &seconds) || seconds <= 0) {
    status_ = absl::InternalError(absl::StrCat("answered ", answer));
    return status_;
  }
  return seconds;
}

void PeerProcess::Stop() { (void)kill(-pid_, SIGSTOP); }
void PeerProcess::Continue() { (void)kill(-pid_, SIGCONT); }

void PeerProcess::Bind(bool pinned) {
  BindProcess(pid_, pinned ? kWorkerCpu : -1);
  if (target_ > 0) BindProcess(target_, pinned ? kStoreCpu : -1);
}

}  // namespace kvt
