// Instruments of a store, set from its figures (docs/METRICS.md). Owned by main; not thread-safe.
#pragma once

#include <array>

#include "kernels/base/metrics.h"
#include "kvstore/wire/store_api.h"

namespace kvt {

class StoreMetrics {
 public:
  explicit StoreMetrics(MetricsRegistry& registry);
  void Observe(const StoreStats& stats);
  void SetReady(bool ready) { ready_.Set(ready ? 1 : 0); }

 private:
  void ObserveDisk(const StoreStats& stats);

  // States of the arena's bytes; they sum to the capacity.
  enum State { kBase, kResidual, kReserved, kWriting, kEvicting, kPromoting, kFree, kStates };

  Gauge& ready_;
  Gauge& capacity_bytes_;
  std::array<Gauge*, kStates> bytes_{};
  Gauge& blocks_;
  Gauge& pinned_blocks_;
  Gauge& pins_;
  Gauge& in_flight_;
  Gauge& output_reserved_blocks_;
  Gauge& sessions_;
  Gauge& tickets_;
  Counter& lookups_;
  Counter& hit_;
  Counter& base_only_;
  Counter& miss_;
  Counter& evicted_;
  Counter& refused_;
  Counter& pulled_;
  Counter& pushed_;
  Counter& checksum_failures_;
  Counter& mismatched_;
  Counter& lapsed_;
  // The second medium, by plane.
  std::array<Gauge*, kPlanes> disk_bytes_{};
  std::array<Gauge*, kPlanes> disk_records_{};
  std::array<Counter*, kPlanes> spilled_{};
  std::array<Counter*, kPlanes> promoted_{};
  std::array<Counter*, kPlanes> dropped_{};
  Gauge& disk_used_bytes_;
  Gauge& spill_queue_bytes_;
  Gauge& disk_failing_;
  Gauge& index_bytes_;
  Counter& spill_failures_;
  Counter& promote_failures_;
  Counter& tenant_refused_;
  Counter& spill_waits_;
  Counter& promote_retries_;
};

}  // namespace kvt
