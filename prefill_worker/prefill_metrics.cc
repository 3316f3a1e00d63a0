#include "prefill_worker/prefill_metrics.h"

namespace kvt {
namespace {

const std::vector<double> kSeconds = {0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60};

}  // namespace

PrefillMetrics::PrefillMetrics(MetricsRegistry& registry)
    : done_(registry.NewCounter("kvtide_prefill_jobs_total", "Jobs that ended, by outcome",
                                {{"outcome", "done"}})),
      failed_(registry.NewCounter("kvtide_prefill_jobs_total", "Jobs that ended, by outcome",
                                  {{"outcome", "failed"}})),
      cancelled_(registry.NewCounter("kvtide_prefill_jobs_total", "Jobs that ended, by outcome",
                                     {{"outcome", "cancelled"}})),
      computed_tokens_(registry.NewCounter("kvtide_prefill_computed_tokens_total",
                                           "Tokens whose KV was computed")),
      reused_tokens_(registry.NewCounter("kvtide_prefill_reused_tokens_total",
                                         "Tokens whose KV lay in the tier")),
      pulled_bytes_(registry.NewCounter("kvtide_prefill_pulled_bytes_total",
                                        "Bytes pulled from the tier")),
      pushed_bytes_(registry.NewCounter("kvtide_prefill_pushed_bytes_total",
                                        "Bytes pushed to the tier")),
      lost_pushes_(registry.NewCounter("kvtide_prefill_lost_pushes_total",
                                       "Pushes of one layer of a block that did not arrive")),
      repaired_blocks_(registry.NewCounter("kvtide_prefill_repaired_blocks_total",
                                           "Blocks placed again after a store lost them")),
      reserve_refusals_(registry.NewCounter("kvtide_prefill_reserve_refusals_total",
                                            "Times that the stores had no room for a job yet")),
      declined_tokens_(registry.NewCounter("kvtide_prefill_declined_tokens_total",
                                           "Stored tokens computed because that is faster")),
      without_tier_(registry.NewCounter("kvtide_prefill_without_tier_total",
                                        "Requests handed over while no store was reachable")),
      selections_(registry.NewCounter("kvtide_prefill_selections_total",
                                      "First selections made for offloaded requests")),
      digest_bytes_(registry.NewCounter("kvtide_prefill_digest_bytes_total",
                                        "Bytes of digests pushed to the tier")),
      digests_refused_(registry.NewCounter("kvtide_prefill_digest_blocks_refused_total",
                                           "Blocks whose digest found no room or was lost")),
      disk_bytes_(registry.NewCounter("kvtide_prefill_disk_bytes_total",
                                      "Bytes pulled that a store read from its disk first")),
      saturated_values_(registry.NewCounter("kvtide_prefill_saturated_values_total",
                                            "KV values beyond fp16, written as its largest")),
      slots_used_(registry.NewGauge("kvtide_prefill_used_slots", "Device slots that are not free")),
      waiting_(registry.NewGauge("kvtide_prefill_waiting_jobs", "Jobs that wait for slots")),
      active_(registry.NewGauge("kvtide_prefill_active_jobs", "Jobs that hold slots or a hand-over")),
      queued_seconds_(registry.NewHistogram("kvtide_prefill_queued_seconds",
                                            "Submit to the first chunk", kSeconds)),
      compute_seconds_(registry.NewHistogram("kvtide_prefill_compute_seconds",
                                             "First chunk to first token", kSeconds)),
      hand_over_seconds_(registry.NewHistogram("kvtide_prefill_hand_over_seconds",
                                               "First token to acknowledged hand-over", kSeconds)) {}

void PrefillMetrics::JobEnded(const absl::Status& status) {
  (status.ok() ? done_ : absl::IsCancelled(status) ? cancelled_ : failed_).Add(1);
}

void PrefillMetrics::Computed(const PrefillFigures& figures) {
  computed_tokens_.Add(static_cast<double>(figures.computed_tokens));
  reused_tokens_.Add(static_cast<double>(figures.reused_tokens));
  pulled_bytes_.Add(static_cast<double>(figures.pulled_bytes));
  disk_bytes_.Add(static_cast<double>(figures.disk_bytes));
  saturated_values_.Add(static_cast<double>(figures.saturated_values));
  queued_seconds_.Observe(absl::ToDoubleSeconds(figures.queued));
  compute_seconds_.Observe(absl::ToDoubleSeconds(figures.compute));
}

void PrefillMetrics::HandedOver(const PrefillFigures& figures) {
  hand_over_seconds_.Observe(absl::ToDoubleSeconds(figures.hand_over));
}

void PrefillMetrics::Pushed(uint64_t bytes, int blocks_lost) {
  pushed_bytes_.Add(static_cast<double>(bytes));
  lost_pushes_.Add(blocks_lost);
}

void PrefillMetrics::BlocksRepaired(int blocks) { repaired_blocks_.Add(blocks); }

void PrefillMetrics::Occupancy(uint64_t slots_used, uint64_t jobs_waiting, uint64_t jobs_active) {
  slots_used_.Set(static_cast<double>(slots_used));
  waiting_.Set(static_cast<double>(jobs_waiting));
  active_.Set(static_cast<double>(jobs_active));
}

}  // namespace kvt
