// Every operation of the model once, as an interface; one implementation per backend (kernels/cpu,
// kernels/cuda). The CPU one is also the reference that the CUDA one is tested against.
//
// All pointers are device addresses, 64-byte aligned at their start; strides are in elements. An
// operation is enqueued and returns at once; its arguments are copied, the memory they point to
// stays valid until the operation has run. No operation allocates. Activations between matrix
// products are f32; inputs of matrix products ("act") are bf16 (as uint16_t) in ComputeType::kBf16
// and f32 in kF32. Each row of a result depends on its own row (and sequence) alone, bit for bit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/paged_kv.h"
#include "kernels/sampling.h"
#include "kernels/selection.h"
#include "kernels/slot_burst.h"

namespace kvt {

// Weights of one matrix product in the backend's own order, packed once. Immutable.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  [[nodiscard]] virtual int in_features() const = 0;
  [[nodiscard]] virtual int out_features() const = 0;
  [[nodiscard]] virtual ComputeType compute() const = 0;
  // Bytes read by a product with one row.
  [[nodiscard]] virtual size_t bytes() const = 0;
  // How it is computed ("fma", "onednn-2.6.3 brg:avx512_core"): bits may differ between two; part of
  // the numerics id.
  [[nodiscard]] virtual const std::string& implementation() const = 0;
};

// Host weights, row-major [out_features][in_features] as in Hugging Face folders. Several parts are
// stacked along out_features into one product (q, k, v; gate, up).
struct WeightPart {
  const uint16_t* bf16 = nullptr;  // one of the two
  const float* f32 = nullptr;
  int out_features = 0;
};

// out[r] = embedding[token[r]], widened to f32.
struct EmbedArgs {
  const int32_t* tokens = nullptr;
  int rows = 0;
  const void* table = nullptr;  // [vocabulary][width], bf16 (kBf16) or f32 (kF32)
  ComputeType table_type = ComputeType::kBf16;
  int width = 0;
  float* out = nullptr;  // [rows][width]
};

// out[r] = x[row(r)] / sqrt(mean(x^2) + epsilon) * weight, rounded to act.
struct RmsNormArgs {
  const float* x = nullptr;  // stride `width`
  const int32_t* row_index = nullptr;  // row(r); null: r
  int rows = 0;
  int width = 0;
  const float* weight = nullptr;
  float epsilon = 0;
  void* out = nullptr;  // act [rows][width]
  ComputeType out_type = ComputeType::kBf16;
};

enum class MatmulEpilogue : uint8_t {
  kStore,   // out = a * w^T
  kAdd,     // out = out + a * w^T  (the residual)
  kSwiGlu,  // w = gate stacked on up: out = silu(gate) * up, as act, width out_features / 2
};

struct MatmulArgs {
  const char* name = "matmul";  // for profiles; a literal
  const PackedMatrix* weights = nullptr;
  MatmulEpilogue epilogue = MatmulEpilogue::kStore;
  const void* a = nullptr;  // act [rows][in_features], dense
  int rows = 0;
  void* out = nullptr;  // f32 [rows][out_features] dense; kSwiGlu: act [rows][out_features / 2]
  // Scratch of WorkspaceBytes(...) for this operation alone.
  void* workspace = nullptr;
};

// x[r] += bias, in place.
struct AddBiasArgs {
  float* x = nullptr;  // row r at x + r * stride
  int stride = 0;
  int rows = 0;
  int width = 0;
  const float* bias = nullptr;  // [width]
};

// RmsNorm of each head of each row, in place (the q and k norm of Qwen3).
struct NormHeadsArgs {
  float* x = nullptr;  // row r head h at x + r * stride + h * head_dim
  int stride = 0;
  int rows = 0;
  int heads = 0;
  int head_dim = 0;
  const float* weight = nullptr;  // [head_dim]
  float epsilon = 0;
};

// Rotates q and k in place (Hugging Face's half-split pairing: channel i with i + head_dim / 2), in
// f32: x' = x cos - y sin, y' = y cos + x sin with the row's position.
struct RopeArgs {
  float* qk = nullptr;  // row r head h at qk + r * stride + h * head_dim
  int stride = 0;
  int heads = 0;  // query heads and KV heads together
  int head_dim = 0;
  int rows = 0;
  const int32_t* positions = nullptr;  // [rows]
  const float* cos_sin = nullptr;      // [positions][head_dim]: head_dim / 2 cosines, then sines
};

// paged_kv.h has what these compute. `stats` points to device memory that is added to.
struct KvWriteStats {
  uint64_t saturated = 0;
  uint64_t nan = 0;
};

// One token per row. `out` gets token ids; kTokenInvalid where a logit is NaN.
struct SampleArgs {
  const float* logits = nullptr;  // [rows][vocabulary]
  int rows = 0;
  int vocabulary = 0;
  const SampleParams* params = nullptr;  // [rows]
  int32_t* out = nullptr;
  void* workspace = nullptr;  // WorkspaceBytes
};

class Ops {
 public:
  virtual ~Ops() = default;

  // kBf16 where the processor has bf16 arithmetic, else kF32.
  [[nodiscard]] virtual ComputeType PreferredCompute() const = 0;
  // Backend, compute type and what all operations but Matmul run on ("cpu bf16 attn:avx512bf16"):
  // with PackedMatrix::implementation() it makes up the numerics id.
  [[nodiscard]] virtual std::string NumericsTag(ComputeType compute) const = 0;

  // Packs weights, creates what products with 1 .. max_rows rows need, and probes that every number
  // of rows gives bitwise equal rows, padding rows or changing the implementation where it must.
  // ResourceExhausted. Synchronous, for start-up. kSwiGlu needs two parts of equal out_features.
  [[nodiscard]] virtual absl::StatusOr<std::unique_ptr<PackedMatrix>> PackWeights(
      ComputeType compute, MatmulEpilogue epilogue, int in_features,
      absl::Span<const WeightPart> parts, int max_rows) = 0;

  // Scratch bytes for a matmul with these weights and up to that many rows, for attention, and for
  // sampling with up to that many rows.
  [[nodiscard]] virtual size_t MatmulWorkspaceBytes(const PackedMatrix& weights, int rows) const = 0;
  [[nodiscard]] virtual size_t AttentionWorkspaceBytes(const Geometry& geometry, int query_heads,
                                                       int segments,
                                                       int context_tokens_max) const = 0;
  [[nodiscard]] virtual size_t SampleWorkspaceBytes(int rows, int vocabulary) const = 0;
  // For ScoreBlocks over up to that many rows with up to `blocks` blocks each and `queries` query
  // heads that score (selecting heads x their group).
  [[nodiscard]] virtual size_t ScoreWorkspaceBytes(int queries, int rows, int blocks) const = 0;
  [[nodiscard]] virtual size_t SelectWorkspaceBytes(int rows, int blocks) const = 0;

  virtual void Embed(Stream& stream, const EmbedArgs& args) = 0;
  virtual void RmsNorm(Stream& stream, const RmsNormArgs& args) = 0;
  virtual void Matmul(Stream& stream, const MatmulArgs& args) = 0;
  virtual void AddBias(Stream& stream, const AddBiasArgs& args) = 0;
  virtual void NormHeads(Stream& stream, const NormHeadsArgs& args) = 0;
  virtual void Rope(Stream& stream, const RopeArgs& args) = 0;
  // The segments (host memory) of WriteKv and PagedAttention stay valid until the operation has run.
  virtual void WriteKv(Stream& stream, const WriteKvArgs& args, KvWriteStats* stats) = 0;
  virtual void PagedAttention(Stream& stream, const PagedAttentionArgs& args, void* workspace,
                              size_t workspace_bytes) = 0;
  virtual void Sample(Stream& stream, const SampleArgs& args) = 0;
  // slot_burst.h; `slot_ids` and `entries` are device memory that stays valid until it has run.
  virtual void GatherSlots(Stream& stream, const GatherSlotsArgs& args) = 0;
  virtual void ScatterSlots(Stream& stream, const ScatterSlotsArgs& args) = 0;
  // selection.h; specs and segments (host memory) stay valid until the operation has run.
  virtual void MakeDigest(Stream& stream, const MakeDigestArgs& args) = 0;
  virtual void ScoreBlocks(Stream& stream, const ScoreBlocksArgs& args, void* workspace,
                           size_t workspace_bytes) = 0;
  virtual void SelectTopBlocks(Stream& stream, const SelectTopBlocksArgs& args, void* workspace,
                               size_t workspace_bytes) = 0;
};

}  // namespace kvt
