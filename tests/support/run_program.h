// Runs a program with a deadline and keeps what it printed. Not thread-safe; Linux only.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace kvt {

struct ProgramResult {
  int code = -1;  // 128 + signal when a signal ended it; -1: killed at the deadline
  std::string out;
  std::string err;
};

// A running program. Reads its output as it comes.
class Program {
 public:
  explicit Program(const std::vector<std::string>& arguments, const std::string& input = "") {
    int in[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out_, O_CLOEXEC) != 0 || pipe2(err_, O_CLOEXEC) != 0) {
      ADD_FAILURE() << "pipe";
      return;
    }
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, in[0], 0);
    posix_spawn_file_actions_adddup2(&files, out_[1], 1);
    posix_spawn_file_actions_adddup2(&files, err_[1], 2);
    std::vector<char*> argv;
    for (const std::string& text : arguments) argv.push_back(const_cast<char*>(text.c_str()));
    argv.push_back(nullptr);
    const int error = posix_spawn(&pid_, argv[0], &files, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    EXPECT_EQ(error, 0) << arguments[0];
    for (const int fd : {in[0], out_[1], err_[1]}) close(fd);
    // Inputs of tests fit into a pipe or are read at once.
    signal(SIGPIPE, SIG_IGN);
    for (size_t at = 0; at < input.size();) {
      const ssize_t wrote = write(in[1], input.data() + at, input.size() - at);
      if (wrote <= 0) break;
      at += static_cast<size_t>(wrote);
    }
    close(in[1]);
  }
  ~Program() {
    if (pid_ > 0 && !ended_) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(out_[0]);
    close(err_[0]);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void Signal(int number) const { kill(pid_, number); }
  [[nodiscard]] const std::string& out() const { return result_.out; }

  // Reads until stdout holds at least `bytes`, or `timeout`; whether it does.
  bool AwaitOutput(size_t bytes, absl::Duration timeout) {
    const absl::Time deadline = absl::Now() + timeout;
    while (result_.out.size() < bytes && Read(deadline)) {
    }
    return result_.out.size() >= bytes;
  }
  ProgramResult Finish(absl::Duration timeout) {
    const absl::Time deadline = absl::Now() + timeout;
    while (Read(deadline)) {
    }
    if (absl::Now() >= deadline) kill(pid_, SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
    ended_ = true;
    if (absl::Now() < deadline) {
      result_.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return result_;
  }

 private:
  // One round; false at the end of both outputs or at the deadline.
  bool Read(absl::Time deadline) {
    pollfd fds[2] = {{out_open_ ? out_[0] : -1, POLLIN, 0}, {err_open_ ? err_[0] : -1, POLLIN, 0}};
    const int64_t rest = absl::ToInt64Milliseconds(deadline - absl::Now());
    if ((!out_open_ && !err_open_) || rest <= 0) return false;
    poll(fds, 2, static_cast<int>(rest));
    char buffer[16384];
    for (int i = 0; i < 2; ++i) {
      if (fds[i].revents == 0) continue;
      const ssize_t got = read(fds[i].fd, buffer, sizeof buffer);
      if (got <= 0) (i == 0 ? out_open_ : err_open_) = false;
      if (got > 0) (i == 0 ? result_.out : result_.err).append(buffer, static_cast<size_t>(got));
    }
    return true;
  }

  pid_t pid_ = 0;
  int out_[2] = {-1, -1};
  int err_[2] = {-1, -1};
  bool out_open_ = true;
  bool err_open_ = true;
  bool ended_ = false;
  ProgramResult result_;
};

inline ProgramResult RunProgram(const std::vector<std::string>& arguments,
                                const std::string& input = "",
                                absl::Duration timeout = absl::Seconds(60)) {
  return Program(arguments, input).Finish(timeout);
}

}  // namespace kvt
