// A worker's reports of its tickets to the coordinator (CoordinatorApi::Update): queued, sent in
// batches from a CallPool's thread, in order, again after a failure. A coordinator that is away for
// long costs the oldest reports (it rebuilds live tickets from heartbeats), never memory or a wait.
//
// Thread-safe. `coordinator` and `calls` outlive it; the pool has stopped before it is destroyed.
#pragma once

#include <deque>

#include "kernels/base/mutex.h"
#include "kvstore/client/call_pool.h"
#include "kvstore/wire/coordinator_api.h"

namespace kvt {

// Reports that wait; beyond that the oldest go.
inline constexpr int kTicketReportsMax = 4096;
// Times a batch is sent.
inline constexpr int kTicketReportAttempts = 3;

class TicketReporter {
 public:
  TicketReporter(CoordinatorApi& coordinator, CallPool& calls)
      : coordinator_(coordinator), calls_(calls) {}
  // Does not block.
  void Report(TicketUpdate update);

 private:
  void Send();

  CoordinatorApi& coordinator_;
  CallPool& calls_;
  Mutex mu_;
  std::deque<TicketUpdate> waiting_ ABSL_GUARDED_BY(mu_);
  bool sending_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvt
