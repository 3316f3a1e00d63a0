#include "tests/support/random_model.h"

#include <cstring>
#include <fstream>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "nlohmann/json.hpp"
#include "tests/support/safetensors_writer.h"

namespace kvt {
namespace {

using nlohmann::json;

struct TensorRule {
  std::string name;
  std::vector<int64_t> shape;
  std::optional<float> scale;  // of a matrix; none: a norm
};

bool IsFamily(const RandomModelSpec& spec, absl::string_view family) {
  return family == spec.family;
}

// In the order that numbers them.
std::vector<TensorRule> Tensors(const RandomModelSpec& spec) {
  const int64_t hidden = spec.hidden, inner = spec.intermediate;
  const int64_t q = int64_t{spec.heads} * spec.head_dim,
                kv = int64_t{spec.kv_heads} * spec.head_dim;
  std::vector<TensorRule> rules = {
      {"model.embed_tokens.weight", {spec.vocab, hidden}, spec.tied ? 0.125f : 1.0f}};
  for (int layer = 0; layer < kRandomModelLayers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    rules.push_back({prefix + "input_layernorm.weight", {hidden}, {}});
    rules.push_back({prefix + "self_attn.q_proj.weight", {q, hidden}, 0.25f});
    rules.push_back({prefix + "self_attn.k_proj.weight", {kv, hidden}, 0.25f});
    rules.push_back({prefix + "self_attn.v_proj.weight", {kv, hidden}, 0.125f});
    rules.push_back({prefix + "self_attn.o_proj.weight", {hidden, q}, 0.125f});
    rules.push_back({prefix + "post_attention_layernorm.weight", {hidden}, {}});
    rules.push_back({prefix + "mlp.gate_proj.weight", {inner, hidden}, 0.125f});
    rules.push_back({prefix + "mlp.up_proj.weight", {inner, hidden}, 0.125f});
    rules.push_back({prefix + "mlp.down_proj.weight", {hidden, inner}, 0.125f});
    if (IsFamily(spec, "qwen2")) {
      rules.push_back({prefix + "self_attn.q_proj.bias", {q}, 0.5f});
      rules.push_back({prefix + "self_attn.k_proj.bias", {kv}, 0.5f});
      rules.push_back({prefix + "self_attn.v_proj.bias", {kv}, 0.5f});
    }
    if (IsFamily(spec, "qwen3")) {
      rules.push_back({prefix + "self_attn.q_norm.weight", {spec.head_dim}, {}});
      rules.push_back({prefix + "self_attn.k_norm.weight", {spec.head_dim}, {}});
    }
  }
  rules.push_back({"model.norm.weight", {hidden}, {}});
  if (!spec.tied) rules.push_back({"lm_head.weight", {spec.vocab, hidden}, 0.25f});
  return rules;
}

// Exact for the values that occur: at most 8 significant bits, in fp16's normal or subnormal range.
void AppendValue(float value, const std::string& dtype, std::string& bytes) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  if (dtype == "F32") {
    bytes.append(reinterpret_cast<const char*>(&bits), 4);
    return;
  }
  uint16_t half = 0;
  if (dtype == "BF16") {
    KVT_CHECK((bits & 0xFFFF) == 0, value);
    half = static_cast<uint16_t>(bits >> 16);
  } else {
    const auto narrow = static_cast<_Float16>(value);
    KVT_CHECK(static_cast<float>(narrow) == value, value);
    std::memcpy(&half, &narrow, 2);
  }
  bytes.append(reinterpret_cast<const char*>(&half), 2);
}

TestTensor MakeTensor(const RandomModelSpec& spec, const TensorRule& rule, uint64_t number) {
  TestTensor tensor{rule.name, spec.dtype, rule.shape, {}};
  int64_t count = 1;
  for (const int64_t size : rule.shape) count *= size;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t random = CounterRandom(spec.seed + number, static_cast<uint64_t>(i));
    const float value = rule.scale.has_value()
                            ? (static_cast<float>(random >> 56) - 128.0f) * (*rule.scale / 128.0f)
                            : (128.0f + static_cast<float>(random >> 57)) / 256.0f;
    AppendValue(value, spec.dtype, tensor.bytes);
  }
  return tensor;
}

void WriteFile(const std::string& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary);
  out << content;
  KVT_CHECK(out.good(), path);
}

}  // namespace

const std::vector<RandomModelSpec>& RandomModelSpecs() {
  static const std::vector<RandomModelSpec> specs = {
      {"gqa1_d64_tied", 101, 4, 4, 64, 256, 384, 512, true, "BF16", 1},
      {"gqa4_d64", 102, 8, 2, 64, 320, 448, 512, false, "F16", 1},
      {"gqa8_d128", 103, 8, 1, 128, 256, 512, 512, false, "F32", 3},
      {"gqa1_d128_odd", 104, 2, 2, 128, 192, 352, 517, false, "BF16", 2},
      {"qwen2_gqa4_d64", 105, 4, 1, 64, 256, 384, 512, true, "BF16", 1, "qwen2"},
      {"qwen3_gqa2_d128", 106, 4, 2, 128, 192, 352, 512, false, "BF16", 2, "qwen3"},
  };
  return specs;
}

void WriteRandomModel(const RandomModelSpec& spec, const std::string& folder) {
  const std::string family = spec.family;
  const std::string architecture = family == "llama"   ? "LlamaForCausalLM"
                                   : family == "qwen2" ? "Qwen2ForCausalLM"
                                                       : "Qwen3ForCausalLM";
  const json config = {{"architectures", {architecture}},
                       {"model_type", family},
                       {"hidden_act", "silu"},
                       {"num_hidden_layers", kRandomModelLayers},
                       {"hidden_size", spec.hidden},
                       {"intermediate_size", spec.intermediate},
                       {"num_attention_heads", spec.heads},
                       {"num_key_value_heads", spec.kv_heads},
                       {"head_dim", spec.head_dim},
                       {"vocab_size", spec.vocab},
                       {"max_position_embeddings", 2048},
                       {"rope_theta", 10000.0},
                       {"rms_norm_eps", 1e-5},
                       {"tie_word_embeddings", spec.tied},
                       {"bos_token_id", 1},
                       {"eos_token_id", 2}};
  WriteFile(folder + "/config.json", config.dump(2));
  const std::vector<TensorRule> rules = Tensors(spec);
  std::vector<std::vector<TestTensor>> shards(spec.shards);
  json weight_map;
  const auto file_name = [&](size_t shard) {
    return absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, spec.shards);
  };
  for (size_t i = 0; i < rules.size(); ++i) {
    shards[i % spec.shards].push_back(MakeTensor(spec, rules[i], i));
    weight_map[rules[i].name] = file_name(i % spec.shards);
  }
  if (spec.shards == 1) {
    WriteFile(folder + "/model.safetensors", SafetensorsFile(shards[0]));
    return;
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    WriteFile(absl::StrCat(folder, "/", file_name(i)), SafetensorsFile(shards[i]));
  }
  WriteFile(folder + "/model.safetensors.index.json", json{{"weight_map", weight_map}}.dump());
}

}  // namespace kvt
