#include "kernels/base/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <string>

namespace kvt {
namespace {

std::atomic<int> g_level{static_cast<int>(LogLevel::kInfo)};
std::atomic<uint64_t> g_problems{0};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return spdlog::level::debug;
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarning: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
  }
  return spdlog::level::err;
}

std::shared_ptr<spdlog::logger>& Logger() {
  static std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>(
        "kvtide", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_level(spdlog::level::debug);
    made->flush_on(spdlog::level::info);
    return made;
  }();
  return logger;
}

}  // namespace

absl::Status InitLog(absl::string_view program, LogLevel level, absl::string_view path) {
  g_level = static_cast<int>(level);
  try {
    const std::string name(program);
    std::shared_ptr<spdlog::sinks::sink> sink;
    if (path.empty()) {
      sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    } else {
      sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(std::string(path));
    }
    auto made = std::make_shared<spdlog::logger>(name, sink);
    made->set_level(spdlog::level::debug);
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%f %^%L%$ %n[%P] %v");
    made->flush_on(spdlog::level::info);
    Logger() = std::move(made);
  } catch (const spdlog::spdlog_ex& error) {
    return absl::PermissionDeniedError(absl::StrCat("log file ", path, ": ", error.what()));
  }
  return absl::OkStatus();
}

void Log(LogLevel level, absl::string_view message) {
  if (level >= LogLevel::kWarning) g_problems.fetch_add(1, std::memory_order_relaxed);
  Logger()->log(ToSpdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

bool LogEnabled(LogLevel level) {
  return static_cast<int>(level) >= g_level.load(std::memory_order_relaxed);
}

uint64_t LoggedProblems() { return g_problems.load(std::memory_order_relaxed); }

}  // namespace kvt
