#include "kernels/model/model_config.h"

#include <gtest/gtest.h>

#include "nlohmann/json.hpp"
#include "tests/support/model_folder.h"

namespace kvt {
namespace {

using nlohmann::json;

json Llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"num_hidden_layers", 2},
          {"hidden_size", 256},
          {"intermediate_size", 512},
          {"num_attention_heads", 8},
          {"num_key_value_heads", 2},
          {"head_dim", 64},
          {"vocab_size", 512},
          {"max_position_embeddings", 4096},
          {"rope_theta", 500000.0},
          {"rms_norm_eps", 1e-5},
          {"hidden_act", "silu"},
          {"tie_word_embeddings", true},
          {"bos_token_id", 1},
          {"eos_token_id", 2},
          {"rope_scaling", nullptr},
          {"attention_bias", false},
          {"mlp_bias", false}};
}

absl::StatusOr<ModelConfig> Load(const json& config, const json& generation = nullptr) {
  TempFolder folder;
  folder.Write("config.json", config.dump());
  if (!generation.is_null()) folder.Write("generation_config.json", generation.dump());
  return LoadModelConfig(folder.path());
}

TEST(ModelConfig, Llama_EveryFieldIsRead) {
  const auto config = Load(Llama());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->architecture, "LlamaForCausalLM");
  EXPECT_EQ(config->layers, 2);
  EXPECT_EQ(config->hidden, 256);
  EXPECT_EQ(config->intermediate, 512);
  EXPECT_EQ(config->heads, 8);
  EXPECT_EQ(config->kv_heads, 2);
  EXPECT_EQ(config->GroupSize(), 4);
  EXPECT_EQ(config->head_dim, 64);
  EXPECT_EQ(config->vocab, 512);
  EXPECT_EQ(config->context_tokens, 4096);
  EXPECT_EQ(config->rope_theta, 500000.0);
  EXPECT_EQ(config->rms_norm_eps, 1e-5);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_EQ(config->bos_id, 1);
  EXPECT_EQ(config->eos_ids, std::vector<int32_t>{2});
  EXPECT_EQ(config->KvGeometry().ToString(), "L2 H2 D64 pair-swizzle");
}

TEST(ModelConfig, AbsentFields_HaveTransformersDefaults) {
  json old = Llama();
  for (const char* name : {"head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps",
                           "tie_word_embeddings", "bos_token_id", "eos_token_id"}) {
    old.erase(name);
  }
  const auto config = Load(old);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->head_dim, 32);
  EXPECT_EQ(config->kv_heads, 8);
  EXPECT_EQ(config->rope_theta, 10000);
  EXPECT_EQ(config->rms_norm_eps, 1e-6);
  EXPECT_FALSE(config->tied_embeddings);
  EXPECT_FALSE(config->bos_id.has_value());
  EXPECT_TRUE(config->eos_ids.empty());
}

TEST(ModelConfig, EosIds_AreJoinedFromBothFiles) {
  json config = Llama();
  config["eos_token_id"] = {7, 5};
  const auto loaded = Load(config, {{"eos_token_id", {5, 9}}});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->eos_ids, (std::vector<int32_t>{5, 7, 9}));
}

TEST(ModelConfig, RopeParameters_OfNewerFolders_AreRead) {
  json config = Llama();
  config.erase("rope_theta");
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 123.0}};
  EXPECT_EQ(Load(config)->rope_theta, 123.0);
}

TEST(ModelConfig, Mistral_OnlyWithoutWindow) {
  json config = Llama();
  config["architectures"] = {"MistralForCausalLM"};
  config["model_type"] = "mistral";
  EXPECT_EQ(Load(config).status().code(), absl::StatusCode::kUnimplemented);  // 4,096 is implied
  config["sliding_window"] = 1024;
  EXPECT_NE(std::string(Load(config).status().message()).find("sliding_window is 1024"),
            std::string::npos);
  config["sliding_window"] = 4096;  // as long as the context: no window
  EXPECT_TRUE(Load(config).ok());
  config["sliding_window"] = nullptr;
  EXPECT_TRUE(Load(config).ok());
}

TEST(ModelConfig, Qwen_IsReadAndItsWindowsAreRefused) {
  json config = Llama();
  config["architectures"] = {"Qwen2ForCausalLM"};
  config["model_type"] = "qwen2";
  config["use_sliding_window"] = false;
  config["sliding_window"] = 1024;  // of no effect while it is off
  config["layer_types"] = {"full_attention", "full_attention"};
  const auto qwen2 = Load(config);
  ASSERT_TRUE(qwen2.ok()) << qwen2.status();
  EXPECT_TRUE(qwen2->qkv_bias && !qwen2->qk_norm);
  config["architectures"] = {"Qwen3ForCausalLM"};
  config["model_type"] = "qwen3";
  const auto qwen3 = Load(config);
  ASSERT_TRUE(qwen3.ok()) << qwen3.status();
  EXPECT_TRUE(qwen3->qk_norm && !qwen3->qkv_bias);
  config["layer_types"] = {"full_attention", "sliding_attention"};
  EXPECT_EQ(Load(config).status().code(), absl::StatusCode::kUnimplemented);
  config.erase("layer_types");
  config["use_sliding_window"] = true;
  EXPECT_EQ(Load(config).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(ModelConfig, UnsupportedModel_IsRefusedNamingFileAndField) {
  const std::pair<std::string, json> cases[] = {
      {"architectures", {"Qwen2MoeForCausalLM"}},
      {"architectures", nullptr},
      {"architectures", {"LlamaForCausalLM", "X"}},
      {"model_type", "mistral"},
      {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8}}},
      {"rope_parameters", {{"rope_type", "yarn"}}},
      {"attention_bias", true},
      {"mlp_bias", true},
      {"hidden_act", "gelu"},
      {"quantization_config", {{"bits", 4}}},
      {"partial_rotary_factor", 0.5},
      {"sliding_window", 100},
  };
  for (const auto& [field, value] : cases) {
    json config = Llama();
    config[field] = value;
    const absl::Status status = Load(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << field << ": " << status;
    EXPECT_NE(std::string(status.message()).find("/config.json: field " + field), std::string::npos)
        << status;
  }
}

TEST(ModelConfig, BadValue_IsRefusedNamingFileAndField) {
  const std::pair<std::string, json> cases[] = {
      {"num_hidden_layers", nullptr},
      {"num_hidden_layers", 0},
      {"num_hidden_layers", 2.5},
      {"num_hidden_layers", 18446744073709551615u},
      {"hidden_size", "256"},
      {"hidden_size", -1},
      {"num_attention_heads", 1 << 20},
      {"num_key_value_heads", 3},
      {"num_key_value_heads", 16},
      {"head_dim", 48},
      {"head_dim", 512},
      {"vocab_size", 0},
      {"max_position_embeddings", nullptr},
      {"rope_theta", 0},
      {"rope_theta", "x"},
      {"rms_norm_eps", -1e-5},
      {"tie_word_embeddings", 1},
      {"attention_bias", "no"},
      {"eos_token_id", 512},
      {"eos_token_id", {-1}},
      {"eos_token_id", "2"},
      {"bos_token_id", 1.5},
  };
  for (const auto& [field, value] : cases) {
    json config = Llama();
    config[field] = value;
    const absl::Status status = Load(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field << ": " << status;
    EXPECT_NE(std::string(status.message()).find("/config.json: field " + field), std::string::npos)
        << status;
  }
  EXPECT_NE(std::string(Load(Llama(), {{"eos_token_id", 1000}}).status().message())
                .find("generation_config.json: field eos_token_id"),
            std::string::npos);
}

TEST(ModelConfig, BrokenFile_IsRefused) {
  TempFolder folder;
  EXPECT_EQ(LoadModelConfig(folder.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(LoadModelConfig(folder.path() + "/none").status().code(), absl::StatusCode::kNotFound);
  for (const std::string text :
       {"", "{", "[]", "3", "{\"a\":1,}", "{\"hidden_size\":1,\"hidden_size\":2}"}) {
    folder.Write("config.json", text);
    const absl::Status status = LoadModelConfig(folder.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text << ": " << status;
    EXPECT_NE(std::string(status.message()).find("config.json"), std::string::npos);
  }
}

TEST(ModelConfig, RealModel_Loads) {
  const std::string folder = RealModelFolder();
  KVT_SKIP_WITHOUT_MODEL(folder);
  const auto config = LoadModelConfig(folder);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->KvGeometry().ToString(), "L30 H3 D64 pair-swizzle");
  EXPECT_EQ(config->GroupSize(), 3);
  EXPECT_EQ(config->vocab, 49152);
  EXPECT_EQ(config->rms_norm_eps, 1e-5);
  EXPECT_EQ(config->eos_ids, std::vector<int32_t>{2});
}

}  // namespace
}  // namespace kvt
