// What a job tells the front end that submitted it: a bounded stream of events with an end. The
// engine writes, the RPC thread of Submit reads. Progress is coalesced: only the latest is kept.
//
// Thread-safe. Shared by the job and its RPC thread.
#pragma once

#include <deque>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kvstore/wire/worker_api.h"

namespace kvt {

class PrefillStream {
 public:
  void Write(PrefillEvent event);
  // Ends the stream; later writes are dropped. The first call counts.
  void Finish(absl::Status status);

  // The next event; none when the stream has ended (then *end has its status) or nothing came
  // within `timeout` (then *end is unchanged).
  std::optional<PrefillEvent> Read(absl::Duration timeout, std::optional<absl::Status>* end);

 private:
  Mutex mu_;
  CondVar changed_;
  std::deque<PrefillEvent> events_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvt
