// The instruments of a decode worker. Thread-safe.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/metrics.h"

namespace kvt {

class DecodeMetrics {
 public:
  explicit DecodeMetrics(MetricsRegistry& registry);

  void Refused();
  void Ended(const absl::Status& status);
  void Step(int rows, absl::Duration duration, uint64_t saturated);
  void Pulled(uint64_t bytes, int blocks, int blocks_lost);
  void Shared(int blocks);
  void WrittenBack(uint64_t bytes, int blocks, int blocks_refused);
  // A sequence's write-back is further behind than kWriteBackBehindMax.
  void FellBehind() { fell_behind_.Add(1); }
  void Resumed();
  // Prompt tokens computed because no store was reachable.
  void ComputedHere(uint64_t tokens) { prompt_tokens_.Add(static_cast<double>(tokens)); }
  // A row of an offloaded step, over its layers.
  void Recalled(int selected, int misses, int left_out);
  // A step of the offloaded batch, and each pull of its misses: one a layer for all rows.
  void OffloadedStep() { offloaded_steps_.Add(1); }
  void StepPulled(uint64_t bytes, uint32_t bursts);
  // Of the misses: lost on their way and pulled once more.
  void MissesRetried(size_t blocks) { misses_retried_.Add(static_cast<double>(blocks)); }
  // Blocks whose digests the tier lacked.
  void DigestsMade(size_t blocks) { digests_made_.Add(static_cast<double>(blocks)); }
  void DigestsWritten(int blocks) { digests_written_.Add(blocks); }
  // Of offloaded sequences, and what they may take.
  void DigestBytes(uint64_t used, uint64_t max);
  void Occupancy(uint64_t slots_used, uint64_t waiting, uint64_t running);

 private:
  Counter& refused_;
  Counter& done_;
  Counter& failed_;
  Counter& cancelled_;
  Counter& tokens_;
  Counter& steps_;
  Counter& pulled_bytes_;
  Counter& pulled_blocks_;
  Counter& lost_blocks_;
  Counter& shared_blocks_;
  Counter& written_bytes_;
  Counter& written_blocks_;
  Counter& fell_behind_;
  Counter& refused_blocks_;
  Counter& resumed_;
  Counter& prompt_tokens_;
  Counter& selected_blocks_;
  Counter& hot_misses_;
  Counter& offloaded_steps_;
  Counter& step_pulls_;
  Counter& step_bursts_;
  Counter& step_bytes_;
  Counter& misses_retried_;
  Counter& left_out_blocks_;
  Counter& digests_made_;
  Counter& digests_written_;
  Counter& saturated_values_;
  Gauge& slots_used_;
  Gauge& digest_bytes_;
  Gauge& digest_bytes_max_;
  Gauge& waiting_;
  Gauge& running_;
  Histogram& step_seconds_;
};

}  // namespace kvt
