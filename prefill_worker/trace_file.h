// A Chrome trace (chrome://tracing, Perfetto) of a prefill worker: when each layer of each step
// computed and when its blocks were pushed. JSON array format; the closing bracket is written when
// the file is closed, and readers of the format do without it.
//
// Thread-safe. Bounded: beyond kTraceEventsMax events it goes silent.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"

namespace kvt {

inline constexpr int64_t kTraceEventsMax = 1'000'000;

class TraceFile {
 public:
  // PermissionDenied or NotFound naming the path.
  static absl::StatusOr<std::unique_ptr<TraceFile>> Create(const std::string& path);
  ~TraceFile();

  // A span on a track ("compute", "push"), with the step and layer it belongs to.
  void Span(absl::string_view track, uint64_t step, int layer, absl::Time begin, absl::Time end,
            uint64_t bytes);
  // Makes what was written visible to readers of the file.
  void Flush();

 private:
  explicit TraceFile(std::FILE* file) : file_(file) {}
  Mutex mu_;
  std::FILE* file_ ABSL_GUARDED_BY(mu_);
  int64_t events_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvt
