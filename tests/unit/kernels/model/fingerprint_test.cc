#include "kernels/model/fingerprint.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/support/model_folder.h"
#include "tests/support/safetensors_writer.h"

namespace kvt {
namespace {

ModelConfig Config() {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.layers = 1;
  config.hidden = config.intermediate = config.vocab = 64;
  config.heads = config.kv_heads = 1;
  config.head_dim = 64;
  config.rope_theta = 10000;
  config.rms_norm_eps = 1e-5;
  return config;
}

std::string Fingerprint(const ModelConfig& config, const std::vector<TestTensor>& tensors) {
  TempFolder folder;
  folder.Write("model.safetensors", SafetensorsFile(tensors));
  const auto files = Safetensors::Open(folder.path());
  EXPECT_TRUE(files.ok()) << files.status();
  return ModelFingerprint(config, **files);
}

std::vector<TestTensor> Tensors() {
  return {{"a", "F32", {2}, "12345678"}, {"big", "U8", {100000}, std::string(100000, 'x')}};
}

TEST(ModelFingerprint, IsThirtyTwoHexDigits_TheSameEachTime) {
  const std::string first = Fingerprint(Config(), Tensors());
  EXPECT_EQ(first.size(), 32u);
  EXPECT_EQ(first.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(Fingerprint(Config(), Tensors()), first);
}

TEST(ModelFingerprint, AnyChange_ChangesIt) {
  std::set<std::string> seen = {Fingerprint(Config(), Tensors())};
  const auto is_new = [&](const ModelConfig& config, const std::vector<TestTensor>& tensors) {
    return seen.insert(Fingerprint(config, tensors)).second;
  };
  for (int ModelConfig::*field :
       {&ModelConfig::layers, &ModelConfig::hidden, &ModelConfig::intermediate, &ModelConfig::heads,
        &ModelConfig::kv_heads, &ModelConfig::head_dim, &ModelConfig::vocab}) {
    ModelConfig config = Config();
    ++(config.*field);
    EXPECT_TRUE(is_new(config, Tensors()));
  }
  ModelConfig config = Config();
  config.rope_theta = 10001;
  EXPECT_TRUE(is_new(config, Tensors()));
  config = Config();
  config.rms_norm_eps = 1e-6;
  EXPECT_TRUE(is_new(config, Tensors()));
  config = Config();
  config.tied_embeddings = true;
  EXPECT_TRUE(is_new(config, Tensors()));

  auto tensors = Tensors();
  tensors[0].name = "c";
  EXPECT_TRUE(is_new(Config(), tensors));
  tensors = Tensors();
  tensors[0].dtype = "I32";
  EXPECT_TRUE(is_new(Config(), tensors));
  tensors = Tensors();
  tensors[0].shape = {1, 2};
  EXPECT_TRUE(is_new(Config(), tensors));
  for (int i = 0; i < 8; ++i) {  // small tensors are hashed whole
    tensors = Tensors();
    tensors[0].bytes[i] ^= 1;
    EXPECT_TRUE(is_new(Config(), tensors)) << i;
  }
  for (const size_t at : {size_t{0}, size_t{50}, size_t{99999}}) {  // first and last window
    tensors = Tensors();
    tensors[1].bytes[at] ^= 1;
    EXPECT_TRUE(is_new(Config(), tensors)) << at;
  }
  tensors = Tensors();
  for (size_t at = 0; at < 100000; at += 200) tensors[1].bytes[at] ^= 1;  // as training would
  EXPECT_TRUE(is_new(Config(), tensors));
}

TEST(ModelFingerprint, Sharding_DoesNotMatter) {
  TempFolder folder;
  folder.Write("x.safetensors", SafetensorsFile({Tensors()[1]}));
  folder.Write("y.safetensors", SafetensorsFile({Tensors()[0]}));
  folder.Write("model.safetensors.index.json",
               R"({"weight_map":{"a":"y.safetensors","big":"x.safetensors"}})");
  const auto files = Safetensors::Open(folder.path());
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(ModelFingerprint(Config(), **files), Fingerprint(Config(), Tensors()));
}

}  // namespace
}  // namespace kvt
