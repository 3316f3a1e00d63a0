#include "tests/bench/llamacpp_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {

absl::StatusOr<LlamacppProcess> LlamacppProcess::Start(const std::string& python,
                                                       const std::string& worker,
                                                       const std::string& gguf, int threads) {
  int to[2], from[2];
  if (pipe(to) != 0 || pipe(from) != 0) return absl::InternalError("pipe");
  const std::string count = absl::StrCat(threads);
  const pid_t pid = fork();
  if (pid < 0) return absl::InternalError("fork");
  if (pid == 0) {
    dup2(to[0], 0);
    dup2(from[1], 1);
    for (const int fd : {to[0], to[1], from[0], from[1]}) close(fd);
    execl(python.c_str(), python.c_str(), worker.c_str(), gguf.c_str(), count.c_str(), nullptr);
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  LlamacppProcess process(pid, to[1], from[0]);
  KVT_ASSIGN_OR_RETURN(const std::string ready, process.ReadLine(120'000));
  if (ready != "ready") return absl::UnavailableError(absl::StrCat("llamacpp_worker: ", ready));
  return process;
}

LlamacppProcess::LlamacppProcess(LlamacppProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), to_(other.to_), from_(other.from_) {}

LlamacppProcess::~LlamacppProcess() {
  if (pid_ < 0) return;
  close(to_);
  close(from_);
  kill(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
}

absl::StatusOr<std::string> LlamacppProcess::ReadLine(int timeout_ms) {
  std::string line;
  for (;;) {
    pollfd fd{from_, POLLIN, 0};
    if (poll(&fd, 1, timeout_ms) <= 0) return absl::DeadlineExceededError("llamacpp_worker is silent");
    char c;
    if (read(from_, &c, 1) != 1) return absl::UnavailableError("llamacpp_worker has ended");
    if (c == '\n') return line;
    line += c;
  }
}

absl::StatusOr<double> LlamacppProcess::Ask(absl::string_view command) {
  const std::string line = absl::StrCat(command, "\n");
  if (write(to_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return absl::UnavailableError("llamacpp_worker has ended");
  }
  KVT_ASSIGN_OR_RETURN(const std::string answer, ReadLine(300'000));
  double seconds;
  if (!absl::SimpleAtod(answer, &seconds)) {
    return absl::UnavailableError(absl::StrCat("llamacpp_worker: ", answer));
  }
  return seconds;
}

}  // namespace kvt
