#include "kvstore/node/store_metrics.h"

namespace kvt {
namespace {

Counter& Looked(MetricsRegistry& registry, const char* outcome) {
  return registry.NewCounter("kvtide_store_lookup_blocks_total",
                             "Blocks asked for, by what was found", {{"outcome", outcome}});
}

void Raise(Counter& counter, uint64_t to) {
  counter.Add(static_cast<double>(to) - counter.Value());
}

}  // namespace

StoreMetrics::StoreMetrics(MetricsRegistry& registry)
    : ready_(registry.NewGauge("kvtide_store_ready",
                               "1 once the arena is populated and workers are let in")),
      capacity_bytes_(registry.NewGauge("kvtide_store_capacity_bytes", "Bytes of the arena")),
      blocks_(registry.NewGauge("kvtide_store_blocks", "Sealed blocks")),
      pinned_blocks_(registry.NewGauge("kvtide_store_pinned_blocks", "Sealed blocks under a pin")),
      pins_(registry.NewGauge("kvtide_store_pins", "Pins: pairs of holder and block")),
      in_flight_(registry.NewGauge("kvtide_store_in_flight_records",
                                   "Records that a running transfer touches")),
      output_reserved_blocks_(registry.NewGauge("kvtide_store_output_reserved_blocks",
                                                "Blocks kept for what decoding will write")),
      sessions_(registry.NewGauge("kvtide_store_sessions", "Sessions of workers")),
      tickets_(registry.NewGauge("kvtide_store_tickets", "Tickets that hold something")),
      lookups_(registry.NewCounter("kvtide_store_lookups_total", "Lookup calls")),
      hit_(Looked(registry, "hit")),
      base_only_(Looked(registry, "base_only")),
      miss_(Looked(registry, "miss")),
      evicted_(registry.NewCounter("kvtide_store_evicted_blocks_total", "Blocks evicted")),
      refused_(registry.NewCounter("kvtide_store_refused_reservations_total",
                                   "Reservations refused for lack of room")),
      pulled_(registry.NewCounter("kvtide_store_pulled_bytes_total",
                                  "Bytes granted to pulls over the network")),
      pushed_(registry.NewCounter("kvtide_store_pushed_bytes_total", "Bytes pushed and kept")),
      checksum_failures_(registry.NewCounter("kvtide_store_checksum_failures_total",
                                             "Pushed pieces with a wrong checksum")),
      mismatched_(registry.NewCounter("kvtide_store_mismatched_blocks_total",
                                      "Misses whose key was there with other content")),
      lapsed_(registry.NewCounter("kvtide_store_lapsed_leases_total",
                                  "Sessions that ended because nobody renewed them")),
      disk_used_bytes_(
          registry.NewGauge("kvtide_store_disk_used_bytes", "Bytes of the second medium's files")),
      spill_queue_bytes_(registry.NewGauge("kvtide_store_spill_queue_bytes",
                                           "Bytes that are being written to disk")),
      disk_failing_(
          registry.NewGauge("kvtide_store_disk_failing", "1 while the disk takes no records")),
      index_bytes_(registry.NewGauge("kvtide_store_index_bytes",
                                     "Heap of the index and the checksums, about")),
      spill_failures_(registry.NewCounter("kvtide_store_spill_failures_total",
                                          "Rounds of the disk's writer that failed")),
      promote_failures_(registry.NewCounter("kvtide_store_promote_failures_total",
                                            "Records that could not be read back")),
      tenant_refused_(registry.NewCounter("kvtide_store_tenant_refused_reservations_total",
                                          "Reservations refused for a tenant's quota")),
      spill_waits_(registry.NewCounter("kvtide_store_spill_waits_total",
                                       "Reservations that waited for the writer to disk")),
      promote_retries_(registry.NewCounter("kvtide_store_promote_retries_total",
                                           "Records read again after an error")) {
  const char* states[kStates] = {"base",     "residual",  "reserved", "writing",
                                 "evicting", "promoting", "free"};
  const char* planes[kPlanes] = {"base", "residual"};
  for (size_t plane = 0; plane < kPlanes; ++plane) {
    disk_bytes_[plane] = &registry.NewGauge("kvtide_store_disk_bytes", "Bytes of records on disk",
                                            {{"plane", planes[plane]}});
    disk_records_[plane] = &registry.NewGauge("kvtide_store_disk_records", "Records on disk",
                                              {{"plane", planes[plane]}});
    spilled_[plane] = &registry.NewCounter("kvtide_store_spilled_records_total",
                                           "Records written to disk", {{"plane", planes[plane]}});
    promoted_[plane] = &registry.NewCounter("kvtide_store_promoted_records_total",
                                            "Records read back", {{"plane", planes[plane]}});
    dropped_[plane] =
        &registry.NewCounter("kvtide_store_dropped_records_total", "Records lost for lack of room",
                             {{"plane", planes[plane]}});
  }
  for (int i = 0; i < kStates; ++i) {
    bytes_[i] = &registry.NewGauge("kvtide_store_bytes", "Bytes of the arena by what holds them",
                                   {{"state", states[i]}});
  }
}

void StoreMetrics::ObserveDisk(const StoreStats& stats) {
  for (size_t plane = 0; plane < kPlanes; ++plane) {
    disk_bytes_[plane]->Set(static_cast<double>(stats.disk_bytes[plane]));
    disk_records_[plane]->Set(static_cast<double>(stats.disk_records[plane]));
    Raise(*spilled_[plane], stats.spilled[plane]);
    Raise(*promoted_[plane], stats.promoted[plane]);
    Raise(*dropped_[plane], stats.dropped[plane]);
  }
  disk_used_bytes_.Set(static_cast<double>(stats.disk_used_bytes));
  spill_queue_bytes_.Set(static_cast<double>(stats.spill_queue_bytes));
  disk_failing_.Set(stats.disk_failing.empty() ? 0 : 1);
  index_bytes_.Set(static_cast<double>(stats.index_bytes));
  Raise(spill_failures_, stats.spill_failures);
  Raise(promote_failures_, stats.promote_failures);
  Raise(tenant_refused_, stats.tenant_refused);
  Raise(spill_waits_, stats.spill_waits);
  Raise(promote_retries_, stats.promote_retries);
}

void StoreMetrics::Observe(const StoreStats& stats) {
  capacity_bytes_.Set(static_cast<double>(stats.capacity_bytes));
  const uint64_t bytes[kStates] = {stats.resident_bytes[0],
                                   stats.resident_bytes[1],
                                   stats.reserved_bytes,
                                   stats.writing_bytes,
                                   stats.evicting_bytes,
                                   stats.promote_queue_bytes,
                                   stats.capacity_bytes - stats.used_bytes};
  for (int i = 0; i < kStates; ++i) bytes_[i]->Set(static_cast<double>(bytes[i]));
  blocks_.Set(static_cast<double>(stats.blocks));
  pinned_blocks_.Set(static_cast<double>(stats.pinned_blocks));
  pins_.Set(static_cast<double>(stats.pins));
  in_flight_.Set(static_cast<double>(stats.in_flight));
  output_reserved_blocks_.Set(static_cast<double>(stats.output_reserved_blocks));
  sessions_.Set(static_cast<double>(stats.sessions));
  tickets_.Set(static_cast<double>(stats.tickets));
  Raise(lookups_, stats.lookups);
  Raise(hit_, stats.hit_blocks);
  Raise(base_only_, stats.base_only_blocks);
  Raise(miss_, stats.lookup_blocks - stats.hit_blocks - stats.base_only_blocks);
  Raise(evicted_, stats.evicted_blocks);
  Raise(refused_, stats.refused);
  Raise(pulled_, stats.pulled_bytes);
  Raise(pushed_, stats.pushed_bytes);
  Raise(checksum_failures_, stats.checksum_failures);
  Raise(mismatched_, stats.mismatched_blocks);
  Raise(lapsed_, stats.lapsed_leases);
  ObserveDisk(stats);
}

}  // namespace kvt
