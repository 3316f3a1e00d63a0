#include "decode_worker/decode_metrics.h"

namespace kvt {

DecodeMetrics::DecodeMetrics(MetricsRegistry& registry)
    : refused_(registry.NewCounter("kvtide_decode_refused_requests_total",
                                   "Hand-overs refused for want of slots or rows")),
      done_(registry.NewCounter("kvtide_decode_requests_total", "Requests that ended, by outcome",
                                {{"outcome", "done"}})),
      failed_(registry.NewCounter("kvtide_decode_requests_total", "Requests that ended, by outcome",
                                  {{"outcome", "failed"}})),
      cancelled_(registry.NewCounter("kvtide_decode_requests_total",
                                     "Requests that ended, by outcome",
                                     {{"outcome", "cancelled"}})),
      tokens_(registry.NewCounter("kvtide_decode_tokens_total", "Output tokens computed")),
      steps_(registry.NewCounter("kvtide_decode_steps_total", "Steps of the batch")),
      pulled_bytes_(registry.NewCounter("kvtide_decode_pulled_bytes_total",
                                        "Bytes pulled from the tier")),
      pulled_blocks_(registry.NewCounter("kvtide_decode_pulled_blocks_total",
                                         "Blocks pulled from the tier")),
      lost_blocks_(registry.NewCounter("kvtide_decode_lost_blocks_total",
                                       "Blocks that the tier did not have or lost")),
      shared_blocks_(registry.NewCounter("kvtide_decode_shared_blocks_total",
                                         "Blocks that another sequence had on the device")),
      written_bytes_(registry.NewCounter("kvtide_decode_written_back_bytes_total",
                                         "Bytes of completed blocks pushed to the tier")),
      written_blocks_(registry.NewCounter("kvtide_decode_written_back_blocks_total",
                                          "Completed blocks pushed to the tier")),
      fell_behind_(registry.NewCounter("kvtide_decode_write_back_behind_total",
                                       "Times that a sequence's write-back fell behind")),
      refused_blocks_(registry.NewCounter("kvtide_decode_refused_blocks_total",
                                          "Completed blocks that no store took")),
      resumed_(registry.NewCounter("kvtide_decode_resumed_requests_total",
                                   "Requests sent back to prefill for lost blocks")),
      prompt_tokens_(registry.NewCounter(
          "kvtide_decode_prompt_tokens_total",
          "Prompt tokens computed here because no store was reachable.")),
      selected_blocks_(registry.NewCounter("kvtide_decode_selected_blocks_total",
                                           "Blocks that steps of offloaded requests chose")),
      hot_misses_(registry.NewCounter("kvtide_decode_hot_misses_total",
                                      "Of those: fetched from the tier")),
      offloaded_steps_(registry.NewCounter("kvtide_decode_offloaded_steps_total",
                                           "Steps of the offloaded batch")),
      step_pulls_(registry.NewCounter("kvtide_decode_step_pulls_total",
                                      "Pulls of their misses, for all requests of the step")),
      step_bursts_(registry.NewCounter("kvtide_decode_step_bursts_total",
                                       "Bursts of those pulls, one for each store")),
      step_bytes_(registry.NewCounter("kvtide_decode_step_bytes_total", "Bytes of those pulls")),
      misses_retried_(registry.NewCounter("kvtide_decode_misses_retried_total",
                                          "Misses that were lost on the way and pulled once more")),
      left_out_blocks_(registry.NewCounter("kvtide_decode_left_out_blocks_total",
                                           "Chosen blocks left out, beyond the fetch cap")),
      digests_made_(registry.NewCounter("kvtide_decode_digests_made_total",
                                        "Blocks whose digests were made from their planes")),
      digests_written_(registry.NewCounter("kvtide_decode_digests_written_total",
                                           "Blocks whose digests were pushed to the tier")),
      saturated_values_(registry.NewCounter("kvtide_decode_saturated_values_total",
                                            "KV values beyond fp16, written as its largest")),
      slots_used_(registry.NewGauge("kvtide_decode_used_slots", "Device slots that are not free")),
      digest_bytes_(registry.NewGauge("kvtide_decode_digest_bytes",
                                      "Device memory of offloaded requests' digests")),
      digest_bytes_max_(registry.NewGauge("kvtide_decode_digest_bytes_max",
                                          "What it may be ([decode] digest_bytes)")),
      waiting_(registry.NewGauge("kvtide_decode_waiting_sequences",
                                 "Sequences that pull or wait for lost blocks")),
      running_(registry.NewGauge("kvtide_decode_running_sequences", "Sequences that step")),
      step_seconds_(registry.NewHistogram("kvtide_decode_step_seconds", "Duration of a step",
                                          {0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2})) {}

void DecodeMetrics::Refused() { refused_.Add(1); }

void DecodeMetrics::Ended(const absl::Status& status) {
  (status.ok() ? done_ : absl::IsCancelled(status) ? cancelled_ : failed_).Add(1);
}

void DecodeMetrics::Step(int rows, absl::Duration duration, uint64_t saturated) {
  steps_.Add(1);
  tokens_.Add(rows);
  saturated_values_.Add(static_cast<double>(saturated));
  step_seconds_.Observe(absl::ToDoubleSeconds(duration));
}

void DecodeMetrics::Pulled(uint64_t bytes, int blocks, int blocks_lost) {
  pulled_bytes_.Add(static_cast<double>(bytes));
  pulled_blocks_.Add(blocks);
  lost_blocks_.Add(blocks_lost);
}

void DecodeMetrics::StepPulled(uint64_t bytes, uint32_t bursts) {
  step_pulls_.Add(1);
  step_bursts_.Add(bursts);
  step_bytes_.Add(static_cast<double>(bytes));
}

void DecodeMetrics::Shared(int blocks) { shared_blocks_.Add(blocks); }

void DecodeMetrics::WrittenBack(uint64_t bytes, int blocks, int blocks_refused) {
  written_bytes_.Add(static_cast<double>(bytes));
  written_blocks_.Add(blocks);
  refused_blocks_.Add(blocks_refused);
}

void DecodeMetrics::Resumed() { resumed_.Add(1); }

void DecodeMetrics::Recalled(int selected, int misses, int left_out) {
  selected_blocks_.Add(selected);
  hot_misses_.Add(misses);
  left_out_blocks_.Add(left_out);
}

void DecodeMetrics::DigestBytes(uint64_t used, uint64_t max) {
  digest_bytes_.Set(static_cast<double>(used));
  digest_bytes_max_.Set(static_cast<double>(max));
}

void DecodeMetrics::Occupancy(uint64_t slots_used, uint64_t waiting, uint64_t running) {
  slots_used_.Set(static_cast<double>(slots_used));
  waiting_.Set(static_cast<double>(waiting));
  running_.Set(static_cast<double>(running));
}

}  // namespace kvt
