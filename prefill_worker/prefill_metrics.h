// The instruments of a prefill worker. Thread-safe.
#pragma once

#include "absl/time/time.h"
#include "kernels/base/metrics.h"
#include "kvstore/wire/worker_api.h"

namespace kvt {

class PrefillMetrics {
 public:
  explicit PrefillMetrics(MetricsRegistry& registry);

  void JobEnded(const absl::Status& status);
  // A job computed its first token.
  void Computed(const PrefillFigures& figures);
  void HandedOver(const PrefillFigures& figures);
  void Pushed(uint64_t bytes, int blocks_lost);
  void BlocksRepaired(int blocks);
  // Stored tokens that are computed because that is faster.
  void Declined(uint64_t tokens) { declined_tokens_.Add(static_cast<double>(tokens)); }
  // The stores had no room for a job, which tries again.
  void ReserveRefused() { reserve_refusals_.Add(1); }
  // A job went on without a reachable store.
  void WithoutTier() { without_tier_.Add(1); }
  // Of offloaded requests: first selections made, digests stored, digest blocks that found no room or
  // were lost.
  void Selected() { selections_.Add(1); }
  void DigestsPushed(uint64_t bytes) { digest_bytes_.Add(static_cast<double>(bytes)); }
  void DigestsRefused(int blocks) { digests_refused_.Add(blocks); }
  void Occupancy(uint64_t slots_used, uint64_t jobs_waiting, uint64_t jobs_active);

 private:
  Counter& done_;
  Counter& failed_;
  Counter& cancelled_;
  Counter& computed_tokens_;
  Counter& reused_tokens_;
  Counter& pulled_bytes_;
  Counter& pushed_bytes_;
  Counter& lost_pushes_;
  Counter& repaired_blocks_;
  Counter& reserve_refusals_;
  Counter& declined_tokens_;
  Counter& without_tier_;
  Counter& selections_;
  Counter& digest_bytes_;
  Counter& digests_refused_;
  Counter& disk_bytes_;
  Counter& saturated_values_;
  Gauge& slots_used_;
  Gauge& waiting_;
  Gauge& active_;
  Histogram& queued_seconds_;
  Histogram& compute_seconds_;
  Histogram& hand_over_seconds_;
};

}  // namespace kvt
