#include "kernels/base/check.h"

#include <execinfo.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace kvt {

void CheckFailed(const char* file, int line, const char* expr, const std::string& detail) {
  std::fprintf(stderr, "%s:%d: check failed: %s %s\n", file, line, expr, detail.c_str());
  void* frames[48];
  const int n = backtrace(frames, 48);
  backtrace_symbols_fd(frames, n, STDERR_FILENO);
  std::abort();
}

}  // namespace kvt
