#include "decode_worker/decode_options.h"

namespace kvt {
namespace {

// Sinks, recent tokens and one selected block.
constexpr int kSparseBudgetMin = 160;

}  // namespace

DecodeOptions ReadDecodeOptions(OptionsTable table) {
  DecodeOptions options;
  table.GetBytes("slots_bytes", &options.slots_bytes, 1 * kMiB, 4096 * kGiB);
  table.GetBytes("digest_bytes", &options.digest_bytes, 0, 4096 * kGiB);
  table.Get("batch_max", &options.batch_max, 1, kDecodeBatchMax);
  table.Get("pulls_max", &options.pulls_max, 1, kDecodeBatchMax);
  table.Get("detach_timeout", &options.detach_timeout, absl::Milliseconds(100), absl::Hours(1));
  table.Get("keep_finished", &options.keep_finished, absl::ZeroDuration(), absl::Hours(1));
  table.Get("resume_timeout", &options.resume_timeout, absl::Seconds(1), absl::Hours(1));
  table.Get("drain_timeout", &options.drain_timeout, absl::ZeroDuration(), absl::Minutes(10));
  table.Get("sparse_budget", &options.offload.tokens, kSparseBudgetMin, kSequenceTokensMax);
  table.Get("hot_factor", &options.offload.hot_factor, 1.0, 64.0);
  table.Get("fetch_cap", &options.offload.fetch_share, 0.001, 1.0);
  table.Get("attend_resident", &options.offload.attend_resident);
  return options;
}

}  // namespace kvt
