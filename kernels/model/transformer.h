// A Llama-family model on a device, as layer-granular steps over a batch that mixes decode rows and
// prefill chunks. One step is
//
//   Begin(stream, state, cache, segments)
//   for each layer: ProjectQkv(layer)   norm, q k v, rope in f32, KV written to slots
//                   Attend(layer)       paged attention over the slots
//                   FinishLayer(layer)  output projection, residual, norm, FFN, residual
//   Logits()                            final norm and head, for the rows that asked
//   Sample() or ReadLogits()
//
// Every call only enqueues. Between any two of them the caller may Record events, enqueue table
// changes, or let another step's operations run on the same or another stream: after ProjectQkv(l)
// an event says that the slots of layer l are written. The numerics contract (DESIGN 2): the logits
// of a position depend on its sequence alone, bit for bit, whatever the batch and the chunk bounds.
//
// Rows of a step are numbered through the segments; the logits rows likewise, taking the last
// `logits_rows` rows of each segment.
//
// Sparse attention: between ProjectQkv and Attend the caller may read Activations().qkv, choose
// blocks, and call AttendOver with tables of its own instead of Attend. K is stored after rope, so a
// row over a compact table of n blocks (ascending, the row's own block last), at first_position
// 16 (n - 1) + position % 16, attends to the chosen blocks and to nothing else.
//
// Thread-safety: Transformer is immutable after Load (weights packed once, primitives created for a
// closed set of M); a StepState belongs to one step in flight, enqueued from one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/layout/geometry.h"
#include "kernels/model/kv_cache.h"
#include "kernels/sampling.h"
#include "kernels/paged_kv.h"

namespace kvt {

struct ModelConfig;

struct TransformerOptions {
  // Default: bf16 where the device has fast bf16, else f32.
  enum class Compute : uint8_t { kAuto, kF32, kBf16 } compute = Compute::kAuto;
};

// Rows of one sequence in a step.
struct StepSegment {
  int table_row = 0;       // of the KvCache; its table covers first_position + tokens.size()
  int first_position = 0;  // of tokens[0]
  absl::Span<const int32_t> tokens;  // not empty; read before Begin returns
  int logits_rows = 0;     // the last this many rows get logits; 0 for inner prefill chunks
};

struct StepLimits {
  int rows = 0;         // tokens of one step, > 0
  int logits_rows = 0;  // > 0
  int segments = 0;     // > 0
};

// Activations of one step in flight; allocated once.
class StepState;

// Where the activations of the layer in progress lie on the device.
struct LayerActivations {
  int rows = 0;
  // From ProjectQkv to the next ProjectQkv. f32, row r at qkv + r * qkv_stride: q of every head, then
  // k of every KV head (both after rope), then v, head_dim values each.
  float* qkv = nullptr;
  int qkv_stride = 0;  // elements
  // From Attend to FinishLayer. Row r at attended + r * attended_row_bytes: every query head's
  // output, in the type of the products.
  void* attended = nullptr;
  size_t attended_row_bytes = 0;
};

// Payload of the mailbox entry that Sample posts. `tokens` is followed by logits_rows - 1 more.
struct StepResult {
  uint32_t logits_rows;
  uint32_t reserved;
  uint64_t kv_saturated;  // values beyond fp16 that this step wrote as +-65504
  uint64_t kv_nan;        // NaNs that this step wrote; their sequences sample kTokenInvalid
  int32_t tokens[1];
};
// Bytes of the payload for that many logits rows.
[[nodiscard]] constexpr size_t StepResultBytes(int logits_rows) {
  return sizeof(StepResult) + sizeof(int32_t) * static_cast<size_t>(logits_rows);
}

class Transformer {
 public:
  // Reads the folder (config.json, safetensors), packs the weights, creates the primitives and
  // probes the numerics contract. NotFound, InvalidArgument or Unimplemented naming file and field;
  // FailedPrecondition when this processor cannot keep rows bitwise equal.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<Transformer>> Load(
      absl::string_view folder, Device& device, const TransformerOptions& options);
  virtual ~Transformer() = default;

  [[nodiscard]] virtual const ModelConfig& config() const = 0;
  [[nodiscard]] virtual const Geometry& geometry() const = 0;
  [[nodiscard]] virtual ComputeType compute() const = 0;
  // Backend, instruction set, compute type, library version and reduction split. Bits may differ
  // between two ids; part of every KV key.
  [[nodiscard]] virtual const std::string& numerics_id() const = 0;
  [[nodiscard]] virtual Device& device() const = 0;

  [[nodiscard]] virtual absl::StatusOr<std::unique_ptr<StepState>> NewStepState(
      const StepLimits& limits) const = 0;

  // Takes the segments (at most limits.segments, limits.rows tokens and limits.logits_rows logits
  // rows in all, tokens within the vocabulary: KVT_CHECKed) and embeds the tokens.
  virtual void Begin(Stream& stream, StepState& state, KvCache& cache,
                     absl::Span<const StepSegment> segments) const = 0;
  virtual void ProjectQkv(Stream& stream, StepState& state, int layer) const = 0;
  virtual void Attend(Stream& stream, StepState& state, int layer) const = 0;
  [[nodiscard]] virtual LayerActivations Activations(const StepState& state) const = 0;
  // In Attend's place: the rows of the step over other tables. The segments (at most limits.segments,
  // every row in one of them: KVT_CHECKed) stay valid until the operation has run, and so does the
  // device memory of their tables.
  virtual void AttendOver(Stream& stream, StepState& state,
                          absl::Span<const AttentionSegment> segments) const = 0;
  virtual void FinishLayer(Stream& stream, StepState& state, int layer) const = 0;
  virtual void Logits(Stream& stream, StepState& state) const = 0;
  // Samples one token per logits row (params.size() == logits rows) into the mailbox entry as a
  // StepResult and posts `tag`. params are read before the call returns.
  virtual void Sample(Stream& stream, StepState& state, absl::Span<const SampleParams> params,
                      Mailbox& mailbox, int entry, uint64_t tag) const = 0;
  // Copies the f32 logits [logits rows][vocabulary] to the host, stream-ordered.
  virtual void ReadLogits(Stream& stream, StepState& state, float* host) const = 0;
};

class StepState {
 public:
  virtual ~StepState() = default;
  [[nodiscard]] virtual const StepLimits& limits() const = 0;
};

}  // namespace kvt
