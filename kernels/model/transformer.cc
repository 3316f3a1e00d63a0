#include "kernels/model/transformer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kernels/model/model_config.h"
#include "kernels/model/safetensors.h"
#include "kernels/model/step_buffers.h"
#include "kernels/model/weights.h"
#include "kernels/ops.h"

namespace kvt {
namespace {

using Matrix = std::unique_ptr<PackedMatrix>;

struct Layer {
  const float* attention_norm = nullptr;  // into norms_
  const float* ffn_norm = nullptr;
  const float* qkv_bias = nullptr;  // into extras_; null: none
  const float* q_norm = nullptr;    // the same; with k_norm
  const float* k_norm = nullptr;
  Matrix qkv, output, gate_up, down;
};

// Copies host values into new device memory; synchronous, at start.
absl::StatusOr<DeviceBuffer> ToDevice(Device& device, const void* host, size_t bytes) {
  KVT_ASSIGN_OR_RETURN(DeviceBuffer buffer, device.Allocate(bytes));
  std::unique_ptr<Stream> stream = device.NewStream(StreamPriority::kNormal);
  stream->CopyToDevice(buffer.data(), host, bytes);
  stream.reset();
  return buffer;
}

// [positions][head_dim]: cosines of all channel pairs, then sines. In double, rounded once.
std::vector<float> RopeTable(const ModelConfig& config) {
  const int half = config.head_dim / 2;
  std::vector<float> table(static_cast<size_t>(config.context_tokens) *
                           static_cast<size_t>(config.head_dim));
  for (int i = 0; i < half; ++i) {
    const double frequency =
        std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / config.head_dim);
    for (int p = 0; p < config.context_tokens; ++p) {
      float* row = table.data() + static_cast<size_t>(p) * static_cast<size_t>(config.head_dim);
      row[i] = static_cast<float>(std::cos(p * frequency));
      row[half + i] = static_cast<float>(std::sin(p * frequency));
    }
  }
  return table;
}

class LlamaTransformer final : public Transformer {
 public:
  LlamaTransformer(ModelConfig config, Device& device, ComputeType compute)
      : config_(std::move(config)),
        geometry_(config_.KvGeometry()),
        device_(device),
        ops_(device.ops()),
        compute_(compute) {}

  absl::Status LoadWeights(absl::string_view folder);

  const ModelConfig& config() const override { return config_; }
  const Geometry& geometry() const override { return geometry_; }
  ComputeType compute() const override { return compute_; }
  const std::string& numerics_id() const override { return numerics_id_; }
  Device& device() const override { return device_; }

  absl::StatusOr<std::unique_ptr<StepState>> NewStepState(const StepLimits& limits) const override;
  void Begin(Stream& stream, StepState& state, KvCache& cache,
             absl::Span<const StepSegment> segments) const override;
  void ProjectQkv(Stream& stream, StepState& state, int layer) const override;
  void Attend(Stream& stream, StepState& state, int layer) const override;
  LayerActivations Activations(const StepState& state) const override;
  void AttendOver(Stream& stream, StepState& state,
                  absl::Span<const AttentionSegment> segments) const override;
  void FinishLayer(Stream& stream, StepState& state, int layer) const override;
  void Logits(Stream& stream, StepState& state) const override;
  void Sample(Stream& stream, StepState& state, absl::Span<const SampleParams> params,
              Mailbox& mailbox, int entry, uint64_t tag) const override;
  void ReadLogits(Stream& stream, StepState& state, float* host) const override;

 private:
  absl::StatusOr<Matrix> Pack(WeightLoader& loader, MatmulEpilogue epilogue, int in,
                              std::vector<std::pair<std::string, int>> names);
  absl::Status LoadLayer(WeightLoader& loader, int layer);
  absl::Status LoadEmbedding(WeightLoader& loader);
  absl::Status LoadExtras(WeightLoader& loader);
  void SetNumericsId();
  int QkvWidth() const { return (config_.heads + 2 * config_.kv_heads) * config_.head_dim; }
  int QueryWidth() const { return config_.heads * config_.head_dim; }
  void Norm(Stream& stream, StepBuffers& s, const float* weight) const;
  // What some families do to q, k and v between projection and rope.
  void AdjustQkv(Stream& stream, StepBuffers& s, const Layer& layer) const;
  void Multiply(Stream& stream, StepBuffers& s, const char* name, const PackedMatrix& weights,
                MatmulEpilogue epilogue, const void* a, int rows, void* out) const;

  const ModelConfig config_;
  const Geometry geometry_;
  Device& device_;
  Ops& ops_;
  const ComputeType compute_;
  std::string numerics_id_;
  std::vector<Layer> layers_;
  Matrix head_;
  DeviceBuffer norms_;  // [2 * layers + 1][hidden]
  DeviceBuffer extras_;  // of each layer: biases of q, k, v or norms of a head of q, of k
  DeviceBuffer embedding_;
  DeviceBuffer rope_;
};

absl::StatusOr<Matrix> LlamaTransformer::Pack(WeightLoader& loader, MatmulEpilogue epilogue, int in,
                                              std::vector<std::pair<std::string, int>> names) {
  std::vector<WeightPart> parts;
  for (const auto& [name, out] : names) {
    KVT_ASSIGN_OR_RETURN(WeightPart part, loader.Matrix(name, out, in));
    parts.push_back(part);
  }
  KVT_ASSIGN_OR_RETURN(Matrix matrix, ops_.PackWeights(compute_, epilogue, in, parts,
                                                       kPrefillChunkTokensMax));
  loader.Release();
  return matrix;
}

absl::Status LlamaTransformer::LoadLayer(WeightLoader& loader, int layer) {
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  const int kv = config_.kv_heads * config_.head_dim;
  Layer& l = layers_.emplace_back();
  KVT_ASSIGN_OR_RETURN(l.qkv, Pack(loader, MatmulEpilogue::kStore, config_.hidden,
                                   {{prefix + "self_attn.q_proj.weight", QueryWidth()},
                                    {prefix + "self_attn.k_proj.weight", kv},
                                    {prefix + "self_attn.v_proj.weight", kv}}));
  KVT_ASSIGN_OR_RETURN(l.output, Pack(loader, MatmulEpilogue::kAdd, QueryWidth(),
                                      {{prefix + "self_attn.o_proj.weight", config_.hidden}}));
  KVT_ASSIGN_OR_RETURN(l.gate_up, Pack(loader, MatmulEpilogue::kSwiGlu, config_.hidden,
                                       {{prefix + "mlp.gate_proj.weight", config_.intermediate},
                                        {prefix + "mlp.up_proj.weight", config_.intermediate}}));
  KVT_ASSIGN_OR_RETURN(l.down, Pack(loader, MatmulEpilogue::kAdd, config_.intermediate,
                                    {{prefix + "mlp.down_proj.weight", config_.hidden}}));
  return absl::OkStatus();
}

absl::Status LlamaTransformer::LoadEmbedding(WeightLoader& loader) {
  constexpr char kEmbedding[] = "model.embed_tokens.weight";
  KVT_ASSIGN_OR_RETURN(const WeightPart part,
                       loader.Matrix(kEmbedding, config_.vocab, config_.hidden));
  const size_t count = static_cast<size_t>(config_.vocab) * static_cast<size_t>(config_.hidden);
  // Kept as it lies in the file when that is bf16; exact in either type.
  if (part.bf16 != nullptr) {
    KVT_ASSIGN_OR_RETURN(embedding_, ToDevice(device_, part.bf16, count * 2));
  } else {
    KVT_ASSIGN_OR_RETURN(embedding_, ToDevice(device_, part.f32, count * 4));
  }
  KVT_ASSIGN_OR_RETURN(head_,
                       Pack(loader, MatmulEpilogue::kStore, config_.hidden,
                            {{config_.tied_embeddings ? kEmbedding : "lm_head.weight",
                              config_.vocab}}));
  return absl::OkStatus();
}

absl::Status LlamaTransformer::LoadExtras(WeightLoader& loader) {
  if (!config_.qkv_bias && !config_.qk_norm) return absl::OkStatus();
  std::vector<std::pair<std::string, int>> names;
  const int kv = config_.kv_heads * config_.head_dim;
  if (config_.qkv_bias) names = {{"q_proj.bias", QueryWidth()}, {"k_proj.bias", kv}, {"v_proj.bias", kv}};
  if (config_.qk_norm) {
    names.emplace_back("q_norm.weight", config_.head_dim);
    names.emplace_back("k_norm.weight", config_.head_dim);
  }
  std::vector<float> values;
  for (int l = 0; l < config_.layers; ++l) {
    for (const auto& [name, size] : names) {
      KVT_ASSIGN_OR_RETURN(
          const std::vector<float> part,
          loader.Vector(absl::StrCat("model.layers.", l, ".self_attn.", name), size));
      values.insert(values.end(), part.begin(), part.end());
    }
  }
  KVT_ASSIGN_OR_RETURN(extras_, ToDevice(device_, values.data(), values.size() * sizeof(float)));
  const float* next = extras_.as<float>();
  for (Layer& layer : layers_) {
    if (config_.qkv_bias) layer.qkv_bias = std::exchange(next, next + QkvWidth());
    if (config_.qk_norm) {
      layer.q_norm = std::exchange(next, next + config_.head_dim);
      layer.k_norm = std::exchange(next, next + config_.head_dim);
    }
  }
  return absl::OkStatus();
}

absl::Status LlamaTransformer::LoadWeights(absl::string_view folder) {
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<Safetensors> tensors, Safetensors::Open(folder));
  WeightLoader loader(*tensors);
  std::vector<float> norms;
  const auto add_norm = [&](const std::string& name) -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::vector<float> values, loader.Vector(name, config_.hidden));
    norms.insert(norms.end(), values.begin(), values.end());
    return absl::OkStatus();
  };
  layers_.reserve(static_cast<size_t>(config_.layers));
  for (int l = 0; l < config_.layers; ++l) {
    const std::string prefix = absl::StrCat("model.layers.", l, ".");
    KVT_RETURN_IF_ERROR(add_norm(prefix + "input_layernorm.weight"));
    KVT_RETURN_IF_ERROR(add_norm(prefix + "post_attention_layernorm.weight"));
    KVT_RETURN_IF_ERROR(LoadLayer(loader, l));
  }
  KVT_RETURN_IF_ERROR(add_norm("model.norm.weight"));
  KVT_RETURN_IF_ERROR(LoadExtras(loader));
  KVT_RETURN_IF_ERROR(LoadEmbedding(loader));
  KVT_ASSIGN_OR_RETURN(norms_, ToDevice(device_, norms.data(), norms.size() * sizeof(float)));
  for (int l = 0; l < config_.layers; ++l) {
    Layer& layer = layers_[static_cast<size_t>(l)];
    layer.attention_norm = norms_.as<float>() + static_cast<size_t>(2 * l) *
                                                    static_cast<size_t>(config_.hidden);
    layer.ffn_norm = layer.attention_norm + config_.hidden;
  }
  const std::vector<float> rope = RopeTable(config_);
  KVT_ASSIGN_OR_RETURN(rope_, ToDevice(device_, rope.data(), rope.size() * sizeof(float)));
  SetNumericsId();
  return absl::OkStatus();
}

void LlamaTransformer::SetNumericsId() {
  std::set<std::string> implementations = {head_->implementation()};
  for (const Layer& layer : layers_) {
    for (const Matrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      implementations.insert((*matrix)->implementation());
    }
  }
  numerics_id_ = absl::StrCat("1 ", ops_.NumericsTag(compute_), " matmul:",
                              absl::StrJoin(implementations, "+"));
}

absl::StatusOr<std::unique_ptr<StepState>> LlamaTransformer::NewStepState(
    const StepLimits& limits) const {
  StepSizes sizes;
  sizes.hidden = config_.hidden;
  sizes.qkv_width = QkvWidth();
  sizes.query_width = QueryWidth();
  sizes.intermediate = config_.intermediate;
  sizes.vocab = config_.vocab;
  sizes.act_bytes = compute_ == ComputeType::kBf16 ? 2 : 4;
  const Layer& layer = layers_[0];
  for (const Matrix* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
    sizes.workspace_bytes =
        std::max(sizes.workspace_bytes, ops_.MatmulWorkspaceBytes(**matrix, limits.rows));
  }
  sizes.attention_bytes = ops_.AttentionWorkspaceBytes(geometry_, config_.heads, limits.segments,
                                                       config_.context_tokens);
  sizes.workspace_bytes = std::max(
      {sizes.workspace_bytes, sizes.attention_bytes,
       ops_.MatmulWorkspaceBytes(*head_, limits.logits_rows),
       ops_.SampleWorkspaceBytes(limits.logits_rows, config_.vocab)});
  return StepBuffers::Create(device_, limits, sizes, geometry_.layers);
}

void LlamaTransformer::Begin(Stream& stream, StepState& state, KvCache& cache,
                             absl::Span<const StepSegment> segments) const {
  StepBuffers& s = static_cast<StepBuffers&>(state);
  KVT_CHECK(cache.geometry() == geometry_, cache.geometry().ToString());
  s.TakeSegments(stream, cache, segments, config_.vocab, config_.context_tokens);
  EmbedArgs embed;
  embed.tokens = s.tokens();
  embed.rows = s.rows();
  embed.table = embedding_.data();
  const size_t values = static_cast<size_t>(config_.vocab) * static_cast<size_t>(config_.hidden);
  embed.table_type = embedding_.bytes() == values * 2 ? ComputeType::kBf16 : ComputeType::kF32;
  embed.width = config_.hidden;
  embed.out = s.residual();
  ops_.Embed(stream, embed);
}

void LlamaTransformer::Norm(Stream& stream, StepBuffers& s, const float* weight) const {
  RmsNormArgs norm;
  norm.x = s.residual();
  norm.rows = s.rows();
  norm.width = config_.hidden;
  norm.weight = weight;
  norm.epsilon = static_cast<float>(config_.rms_norm_eps);
  norm.out = s.normed();
  norm.out_type = compute_;
  ops_.RmsNorm(stream, norm);
}

void LlamaTransformer::Multiply(Stream& stream, StepBuffers& s, const char* name,
                                const PackedMatrix& weights, MatmulEpilogue epilogue, const void* a,
                                int rows, void* out) const {
  ops_.Matmul(stream, {name, &weights, epilogue, a, rows, out, s.workspace()});
}

void LlamaTransformer::AdjustQkv(Stream& stream, StepBuffers& s, const Layer& layer) const {
  if (layer.qkv_bias != nullptr) {
    ops_.AddBias(stream, {s.qkv(), QkvWidth(), s.rows(), QkvWidth(), layer.qkv_bias});
  }
  if (layer.q_norm == nullptr) return;
  NormHeadsArgs norm;
  norm.x = s.qkv();
  norm.stride = QkvWidth();
  norm.rows = s.rows();
  norm.heads = config_.heads;
  norm.head_dim = config_.head_dim;
  norm.weight = layer.q_norm;
  norm.epsilon = static_cast<float>(config_.rms_norm_eps);
  ops_.NormHeads(stream, norm);
  norm.x += QueryWidth();
  norm.heads = config_.kv_heads;
  norm.weight = layer.k_norm;
  ops_.NormHeads(stream, norm);
}

void LlamaTransformer::ProjectQkv(Stream& stream, StepState& state, int layer) const {
  StepBuffers& s = static_cast<StepBuffers&>(state);
  const Layer& l = layers_[static_cast<size_t>(layer)];
  Norm(stream, s, l.attention_norm);
  Multiply(stream, s, "qkv", *l.qkv, MatmulEpilogue::kStore, s.normed(), s.rows(), s.qkv());
  AdjustQkv(stream, s, l);
  RopeArgs rope;
  rope.qk = s.qkv();
  rope.stride = QkvWidth();
  rope.heads = config_.heads + config_.kv_heads;
  rope.head_dim = config_.head_dim;
  rope.rows = s.rows();
  rope.positions = s.positions();
  rope.cos_sin = rope_.as<float>();
  ops_.Rope(stream, rope);
  WriteKvArgs write;
  write.geometry = geometry_;
  write.slots = s.cache()->slots();
  write.k = s.qkv() + QueryWidth();
  write.v = write.k + config_.kv_heads * config_.head_dim;
  write.k_stride = QkvWidth();
  write.v_stride = QkvWidth();
  write.segments = s.Segments(layer);
  ops_.WriteKv(stream, write, s.stats());
}

void LlamaTransformer::Attend(Stream& stream, StepState& state, int layer) const {
  AttendOver(stream, state, static_cast<StepBuffers&>(state).Segments(layer));
}

LayerActivations LlamaTransformer::Activations(const StepState& state) const {
  const StepBuffers& s = static_cast<const StepBuffers&>(state);
  const size_t act_bytes = compute_ == ComputeType::kBf16 ? 2 : 4;
  return {s.rows(), s.qkv(), QkvWidth(), s.attended(), static_cast<size_t>(QueryWidth()) * act_bytes};
}

void LlamaTransformer::AttendOver(Stream& stream, StepState& state,
                                  absl::Span<const AttentionSegment> segments) const {
  StepBuffers& s = static_cast<StepBuffers&>(state);
  int rows = 0;
  for (const AttentionSegment& segment : segments) {
    KVT_CHECK(segment.first_row == rows && segment.rows > 0, "first_row=", segment.first_row);
    rows += segment.rows;
  }
  KVT_CHECK(rows == s.rows() && static_cast<int>(segments.size()) <= s.limits().segments,
            "rows=", rows, " of ", s.rows(), " segments=", segments.size());
  PagedAttentionArgs args;
  args.geometry = geometry_;
  args.query_heads = config_.heads;
  args.compute = compute_;
  args.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  args.slots = s.cache()->slots();
  args.q = s.qkv();
  args.q_stride = QkvWidth();
  args.out = s.attended();
  args.out_stride = QueryWidth();
  args.segments = segments;
  ops_.PagedAttention(stream, args, s.workspace(), s.attention_bytes());
}

void LlamaTransformer::FinishLayer(Stream& stream, StepState& state, int layer) const {
  StepBuffers& s = static_cast<StepBuffers&>(state);
  const Layer& l = layers_[static_cast<size_t>(layer)];
  Multiply(stream, s, "output", *l.output, MatmulEpilogue::kAdd, s.attended(), s.rows(), s.residual());
  Norm(stream, s, l.ffn_norm);
  Multiply(stream, s, "gate_up", *l.gate_up, MatmulEpilogue::kSwiGlu, s.normed(), s.rows(), s.gated());
  Multiply(stream, s, "down", *l.down, MatmulEpilogue::kAdd, s.gated(), s.rows(), s.residual());
}

void LlamaTransformer::Logits(Stream& stream, StepState& state) const {
  StepBuffers& s = static_cast<StepBuffers&>(state);
  if (s.logits_rows() == 0) return;
  RmsNormArgs norm;
  norm.x = s.residual();
  norm.row_index = s.logits_index();
  norm.rows = s.logits_rows();
  norm.width = config_.hidden;
  norm.weight = norms_.as<float>() + static_cast<size_t>(2 * config_.layers) *
                                         static_cast<size_t>(config_.hidden);
  norm.epsilon = static_cast<float>(config_.rms_norm_eps);
  norm.out = s.normed();
  norm.out_type = compute_;
  ops_.RmsNorm(stream, norm);
  Multiply(stream, s, "head", *head_, MatmulEpilogue::kStore, s.normed(), s.logits_rows(), s.logits());
}

void LlamaTransformer::Sample(Stream& stream, StepState& state,
                              absl::Span<const SampleParams> params, Mailbox& mailbox, int entry,
                              uint64_t tag) const {
  StepBuffers& s = static_cast<StepBuffers&>(state);
  const int rows = s.logits_rows();
  KVT_CHECK(static_cast<int>(params.size()) == rows, "params=", params.size(), " rows=", rows);
  KVT_CHECK(mailbox.entry_bytes() >= StepResultBytes(rows), "entry_bytes=", mailbox.entry_bytes());
  StepResult* result = static_cast<StepResult*>(mailbox.DevicePayload(entry));
  const uint32_t header[2] = {static_cast<uint32_t>(rows), 0};
  stream.WriteToDevice(result, header, sizeof(header));
  static_assert(offsetof(StepResult, kv_nan) - offsetof(StepResult, kv_saturated) ==
                offsetof(KvWriteStats, nan) - offsetof(KvWriteStats, saturated));
  stream.CopyOnDevice(&result->kv_saturated, s.stats(), sizeof(KvWriteStats));
  if (rows > 0) {
    stream.WriteToDevice(s.sample_params(), params.data(), params.size() * sizeof(SampleParams));
    SampleArgs sample;
    sample.logits = s.logits();
    sample.rows = rows;
    sample.vocabulary = config_.vocab;
    sample.params = s.sample_params();
    sample.out = result->tokens;
    sample.workspace = s.workspace();
    ops_.Sample(stream, sample);
  }
  stream.Post(mailbox, entry, tag);
}

void LlamaTransformer::ReadLogits(Stream& stream, StepState& state, float* host) const {
  StepBuffers& s = static_cast<StepBuffers&>(state);
  if (s.logits_rows() == 0) return;
  stream.CopyToHost(host, s.logits(), static_cast<size_t>(s.logits_rows()) *
                                          static_cast<size_t>(config_.vocab) * sizeof(float));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transformer>> Transformer::Load(absl::string_view folder,
                                                               Device& device,
                                                               const TransformerOptions& options) {
  KVT_ASSIGN_OR_RETURN(ModelConfig config, LoadModelConfig(folder));
  ComputeType compute = ComputeType::kF32;
  switch (options.compute) {
    case TransformerOptions::Compute::kAuto:
      compute = device.ops().PreferredCompute();
      break;
    case TransformerOptions::Compute::kF32:
      compute = ComputeType::kF32;
      break;
    case TransformerOptions::Compute::kBf16:
      compute = ComputeType::kBf16;
      break;
  }
  auto transformer = std::make_unique<LlamaTransformer>(std::move(config), device, compute);
  KVT_RETURN_IF_ERROR(transformer->geometry().Validate());
  KVT_RETURN_IF_ERROR(transformer->LoadWeights(folder));
  return transformer;
}

}  // namespace kvt
