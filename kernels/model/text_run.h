// One sequence on a cache of its own, for calibration and for measurements of quality: full
// attention in chunks, then rows at its end over blocks that the owner selects, layer by layer, from
// their queries. The sparse rows of one call are decode steps in a batch: each sees the KV that the
// rows before it wrote, so the result is that of one step after another.
// Owner: a tool or a test, on a host-addressable device. Not thread-safe. Waits for the device at
// every layer, with a deadline.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/model/kv_cache.h"
#include "kernels/model/transformer.h"

namespace kvt {

// Rows of one sparse call: so few that no row's middle (kernels/select/attention_stats.h) reaches
// into the call's own blocks, whose digests do not exist yet.
inline constexpr int kSparseRowsMax = 128;

// What the rows of a layer attend to besides sinks and recent blocks.
struct RowSelections {
  bool full = false;     // everything
  bool by_head = false;  // a list for each row and KV head, [row * kv_heads + head]; else for each row
  std::vector<std::vector<int32_t>> blocks;  // of the middle, ascending

  static RowSelections Full() { return {true, false, {}}; }
};

class TextRun {
 public:
  // Room for `tokens_max` tokens; InvalidArgument, ResourceExhausted. `transformer` outlives it.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<TextRun>> Create(
      const Transformer& transformer, int tokens_max);

  // Called when the q, k and v of rows first_position .. have been computed and written.
  using Observer = std::function<void(int layer, int first_position, const LayerActivations&)>;
  // Full attention for positions first_position ..; earlier ones have been computed.
  [[nodiscard]] absl::Status Prefill(absl::Span<const int32_t> tokens, int first_position,
                                     const Observer& observer);

  // Chooses for every row; the same arguments.
  using Selector =
      std::function<RowSelections(int layer, int first_position, const LayerActivations&)>;
  // At most kSparseRowsMax tokens; logits [tokens][vocabulary].
  [[nodiscard]] absl::StatusOr<std::vector<float>> Decode(absl::Span<const int32_t> tokens,
                                                          int first_position,
                                                          const Selector& selector);

  [[nodiscard]] const Transformer& transformer() const { return transformer_; }
  [[nodiscard]] const KvCache& cache() const { return *cache_; }
  [[nodiscard]] const SlotPair* Table(int layer) const { return cache_->Table(0, layer); }
  [[nodiscard]] Stream& stream() { return *stream_; }
  // Until everything enqueued has run. DeadlineExceeded.
  [[nodiscard]] absl::Status Wait();

 private:
  explicit TextRun(const Transformer& transformer) : transformer_(transformer) {}
  // Attention of the step over one list for each row: lists[row * stride + offset].
  void AttendLists(int layer, int first_position, int rows, const RowSelections& selections,
                   int stride, int offset);
  absl::Status AttendByHead(int layer, int first_position, const RowSelections& selections);

  const Transformer& transformer_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> event_;
  std::unique_ptr<StepState> state_;
  std::unique_ptr<KvCache> cache_;
  DeviceBuffer tables_;                 // [kSparseRowsMax][blocks]
  std::vector<SlotPair> host_tables_;   // the same
  std::vector<AttentionSegment> segments_;
};

}  // namespace kvt
