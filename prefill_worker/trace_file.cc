#include "prefill_worker/trace_file.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<TraceFile>> TraceFile::Create(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr) {
    const std::string message = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::PermissionDeniedError(message);
  }
  std::fputs("[\n", file);
  return std::unique_ptr<TraceFile>(new TraceFile(file));
}

TraceFile::~TraceFile() {
  MutexLock lock(mu_);
  std::fputs("\n]\n", file_);
  std::fclose(file_);
}

void TraceFile::Span(absl::string_view track, uint64_t step, int layer, absl::Time begin,
                     absl::Time end, uint64_t bytes) {
  MutexLock lock(mu_);
  if (events_ >= kTraceEventsMax) return;
  const std::string line = absl::StrFormat(
      "%s{\"name\":\"%s L%d\",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":\"%s\",\"ts\":%.3f,"
      "\"dur\":%.3f,\"args\":{\"step\":%d,\"layer\":%d,\"bytes\":%d}}",
      events_ == 0 ? "" : ",\n", track, layer, track, track,
      absl::ToDoubleMicroseconds(begin - absl::UnixEpoch()), absl::ToDoubleMicroseconds(end - begin),
      step, layer, bytes);
  std::fputs(line.c_str(), file_);
  ++events_;
}

void TraceFile::Flush() {
  MutexLock lock(mu_);
  std::fflush(file_);
}

}  // namespace kvt
