// KVT_CHECK: bugs end the process, with values, in every build. An expected failure is an
// absl::Status instead (docs: STYLE, Errors).
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvt {

// Prints "file:line: check failed: expr detail" with a stack trace to stderr and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* expr,
                              const std::string& detail);

}  // namespace kvt

// Extra arguments are concatenated with absl::StrCat: KVT_CHECK(n > 0, "n=", n).
#define KVT_CHECK(expr, ...)                                                           \
  do {                                                                                 \
    if (!(expr)) [[unlikely]] {                                                        \
      ::kvt::CheckFailed(__FILE__, __LINE__, #expr, ::absl::StrCat("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                                  \
  } while (0)

#define KVT_RETURN_IF_ERROR(expr)                              \
  do {                                                         \
    ::absl::Status kvt_status_ = (expr);                       \
    if (!kvt_status_.ok()) [[unlikely]] return kvt_status_;    \
  } while (0)

#define KVT_CONCAT_INNER(a, b) a##b
#define KVT_CONCAT(a, b) KVT_CONCAT_INNER(a, b)

// KVT_ASSIGN_OR_RETURN(auto value, Compute());
#define KVT_ASSIGN_OR_RETURN(lhs, expr) \
  KVT_ASSIGN_OR_RETURN_IMPL(KVT_CONCAT(kvt_statusor_, __LINE__), lhs, expr)
#define KVT_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr)          \
  auto tmp = (expr);                                       \
  if (!tmp.ok()) [[unlikely]] return tmp.status();         \
  lhs = std::move(tmp).value()
