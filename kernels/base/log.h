// Logging over spdlog (whose headers stay in log.cc). Prompts and generated text are never logged.
// Log once, where the cause is known; nothing above debug on the data path.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvt {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Sets the process's level and, with a non-empty `path`, sends lines there instead of stderr.
// `program` stands in every line. Call once, in main, before threads start. NotFound or
// PermissionDenied when the file cannot be opened.
absl::Status InitLog(absl::string_view program, LogLevel level, absl::string_view path);

void Log(LogLevel level, absl::string_view message);
bool LogEnabled(LogLevel level);

// How many warnings and errors were logged so far: an unexpected one fails a test.
uint64_t LoggedProblems();

}  // namespace kvt

// KVT_LOG(kInfo, "listening on ", address);
#define KVT_LOG(level, ...)                                             \
  do {                                                                  \
    if (::kvt::LogEnabled(::kvt::LogLevel::level))                      \
      ::kvt::Log(::kvt::LogLevel::level, ::absl::StrCat(__VA_ARGS__));  \
  } while (0)
