// What config.json of a Hugging Face folder says of a model, and the refusal of every model whose
// arithmetic is not ours: Llama, Mistral without a sliding window (the same), Qwen2 (biases of q, k and
// v) and Qwen3 (a norm of each head of q and k), dense.
// Plain values; thread-safe to read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/layout/geometry.h"

namespace kvt {

struct ModelConfig {
  std::string architecture;  // "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3..."
  int layers = 0;            // num_hidden_layers
  int hidden = 0;            // hidden_size
  int intermediate = 0;      // intermediate_size
  int heads = 0;             // num_attention_heads, a multiple of kv_heads
  int kv_heads = 0;          // num_key_value_heads
  int head_dim = 0;          // need not be hidden / heads
  int vocab = 0;             // vocab_size
  int context_tokens = 0;    // max_position_embeddings: longest prompt with its output
  double rope_theta = 0;
  double rms_norm_eps = 0;
  bool qkv_bias = false;         // q, k and v have biases: Qwen2
  bool qk_norm = false;          // each head of q and k is normed before rope: Qwen3
  bool tied_embeddings = false;  // then there is no lm_head.weight
  std::optional<int32_t> bos_id;
  std::vector<int32_t> eos_ids;  // of config.json and generation_config.json, sorted; may be empty

  // Query heads that share a KV head.
  [[nodiscard]] int GroupSize() const { return heads / kv_heads; }
  [[nodiscard]] kvt::Geometry KvGeometry() const { return {layers, kv_heads, head_dim}; }
};

// Reads folder/config.json and, where present, folder/generation_config.json.
// NotFound: no such folder or file. InvalidArgument: not JSON, a field missing, of the wrong type
// or out of bounds. Unimplemented: a model we do not compute, for instance another architecture,
// rope scaling, biases, a sliding window, quantised weights. Messages name file and field.
absl::StatusOr<ModelConfig> LoadModelConfig(absl::string_view folder);

}  // namespace kvt
