// tests/bench/llamacpp_worker.py as a child process: one command, one answer in seconds.
// Not thread-safe. The child ends when its input does.
#pragma once

#include <cstdio>
#include <string>

#include <sys/types.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvt {

class LlamacppProcess {
 public:
  // Starts `python worker gguf threads` and waits until the model is loaded (two minutes at most).
  static absl::StatusOr<LlamacppProcess> Start(const std::string& python, const std::string& worker,
                                               const std::string& gguf, int threads);
  LlamacppProcess(LlamacppProcess&& other) noexcept;
  LlamacppProcess& operator=(LlamacppProcess&&) = delete;
  ~LlamacppProcess();

  // Unavailable when the child has ended, DeadlineExceeded after five minutes.
  absl::StatusOr<double> Ask(absl::string_view command);

 private:
  LlamacppProcess(pid_t pid, int to, int from) : pid_(pid), to_(to), from_(from) {}
  absl::StatusOr<std::string> ReadLine(int timeout_ms);

  pid_t pid_;
  int to_, from_;
};

}  // namespace kvt
