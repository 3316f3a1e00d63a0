#include "prefill_worker/prefill_options.h"

namespace kvt {

PrefillOptions ReadPrefillOptions(OptionsTable table) {
  PrefillOptions options;
  table.Get("chunk_tokens", &options.chunk_tokens, kBlockTokens, kPrefillChunkTokensMax);
  if (options.chunk_tokens % kBlockTokens != 0) {
    table.Problem("chunk_tokens", "must be a multiple of 16");
  }
  table.GetBytes("slots_bytes", &options.slots_bytes, 1 * kMiB, 4096 * kGiB);
  table.Get("active_max", &options.active_max, 1, 256);
  table.Get("queue_max", &options.queue_max, 1, kWorkerRequestsMax);
  table.Get("ageing_bound", &options.ageing_bound, absl::ZeroDuration(), absl::Minutes(10));
  table.Get("store_wait", &options.store_wait, absl::ZeroDuration(), absl::Minutes(10));
  table.Get("reserve_ageing", &options.reserve_ageing, absl::ZeroDuration(), absl::Minutes(10));
  table.Get("hand_over_wait", &options.hand_over_wait, absl::ZeroDuration(), absl::Minutes(10));
  table.Get("fetch_planner", &options.fetch_planner);
  table.Get("selection_tokens", &options.selection_tokens, 256, kSequenceTokensMax);
  table.Get("drain_timeout", &options.drain_timeout, absl::ZeroDuration(), absl::Minutes(10));
  table.Get("trace_file", &options.trace_file);
  return options;
}

}  // namespace kvt
