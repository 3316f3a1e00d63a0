#include "kernels/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/model/json_file.h"

namespace kvt {
namespace {

using nlohmann::json;

constexpr int kHiddenMax = 1 << 16;
constexpr int kIntermediateMax = 1 << 18;
constexpr int kHeadsMax = 1024;
constexpr int kVocabMax = 1 << 20;
constexpr int kPositionsMax = 1 << 24;
constexpr int kEosIdsMax = 64;

// One JSON object and the name of its file, for messages.
class Fields {
 public:
  Fields(const json& object, std::string file) : object_(object), file_(std::move(file)) {}

  // Null stands for absent, as in transformers.
  const json* Find(const std::string& name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  bool Has(const std::string& name) const { return object_.contains(name); }

  absl::StatusOr<int> Int(const std::string& name, int min, int max,
                          std::optional<int> fallback = std::nullopt) const {
    const json* value = Find(name);
    if (value == nullptr) {
      if (fallback.has_value()) return *fallback;
      return Invalid(name, "is missing");
    }
    if (!value->is_number_integer()) return Invalid(name, "is not an integer");
    const bool huge =
        value->is_number_unsigned() && value->get<uint64_t>() > std::numeric_limits<int64_t>::max();
    const int64_t number = huge ? std::numeric_limits<int64_t>::max() : value->get<int64_t>();
    if (number < min || number > max) {
      return Invalid(name, absl::StrCat("is ", value->dump(), ", not in [", min, ", ", max, "]"));
    }
    return static_cast<int>(number);
  }

  absl::StatusOr<double> Positive(const std::string& name, double fallback, double max) const {
    const json* value = Find(name);
    if (value == nullptr) return fallback;
    if (!value->is_number()) return Invalid(name, "is not a number");
    const double number = value->get<double>();
    if (!(number > 0 && number <= max)) {
      return Invalid(name, absl::StrCat("is ", value->dump(), ", not in (0, ", max, "]"));
    }
    return number;
  }

  absl::StatusOr<bool> Bool(const std::string& name, bool fallback) const {
    const json* value = Find(name);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) return Invalid(name, "is not true or false");
    return value->get<bool>();
  }

  absl::Status Invalid(const std::string& name, absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(file_, ": field ", name, " ", what));
  }
  absl::Status Unsupported(const std::string& name, absl::string_view supported) const {
    const json* value = Find(name);
    return absl::UnimplementedError(absl::StrCat(file_, ": field ", name, " is ",
                                                 value == nullptr ? "absent" : value->dump(), "; ",
                                                 supported));
  }

 private:
  const json& object_;
  std::string file_;
};

struct Family {
  const char* architecture;
  const char* model_type;
  bool qkv_bias;
  bool qk_norm;
};
constexpr Family kFamilies[] = {
    {"LlamaForCausalLM", "llama", false, false},
    {"MistralForCausalLM", "mistral", false, false},
    {"Qwen2ForCausalLM", "qwen2", true, false},
    {"Qwen3ForCausalLM", "qwen3", false, true},
};

absl::Status ReadArchitecture(const Fields& fields, ModelConfig& config) {
  constexpr absl::string_view kKnown =
      "LlamaForCausalLM, MistralForCausalLM (without sliding window), Qwen2ForCausalLM and "
      "Qwen3ForCausalLM are supported";
  const json* list = fields.Find("architectures");
  if (list == nullptr || !list->is_array() || list->size() != 1 || !list->at(0).is_string()) {
    return fields.Unsupported("architectures", kKnown);
  }
  config.architecture = list->at(0).get<std::string>();
  const auto* family = std::find_if(std::begin(kFamilies), std::end(kFamilies), [&](const Family& f) {
    return config.architecture == f.architecture;
  });
  if (family == std::end(kFamilies)) return fields.Unsupported("architectures", kKnown);
  const json* type = fields.Find("model_type");
  if (type != nullptr && *type != family->model_type) {
    return fields.Unsupported("model_type",
                              absl::StrCat("it does not fit ", config.architecture));
  }
  config.qkv_bias = family->qkv_bias;
  config.qk_norm = family->qk_norm;
  return absl::OkStatus();
}

bool IsQwen(const ModelConfig& config) { return config.qkv_bias || config.qk_norm; }

// A window that is off, absent, or at least as long as the context changes nothing.
absl::Status RefuseWindow(const Fields& fields, const ModelConfig& config) {
  if (IsQwen(config)) {
    KVT_ASSIGN_OR_RETURN(const bool on, fields.Bool("use_sliding_window", false));
    if (on) return fields.Unsupported("use_sliding_window", "only false is supported");
    const json* types = fields.Find("layer_types");
    if (types == nullptr) return absl::OkStatus();
    if (!types->is_array()) return fields.Invalid("layer_types", "is not a list");
    for (const json& type : *types) {
      if (type != "full_attention") {
        return fields.Unsupported("layer_types", "only full_attention is supported");
      }
    }
    return absl::OkStatus();
  }
  // transformers gives Mistral a window of 4,096 where the field is absent.
  const bool implied = config.architecture == "MistralForCausalLM" && !fields.Has("sliding_window");
  if (implied) return fields.Unsupported("sliding_window", "only null is supported");
  if (fields.Find("sliding_window") != nullptr) {
    KVT_ASSIGN_OR_RETURN(const int window,
                         fields.Int("sliding_window", 1, std::numeric_limits<int>::max()));
    if (window < config.context_tokens) {
      return fields.Unsupported("sliding_window",
                                "only null, or at least max_position_embeddings, is supported");
    }
  }
  return absl::OkStatus();
}

// Fields that change the arithmetic and that we do not compute. Qwen's own biases and norms are not
// fields: they come with the architecture.
absl::Status RefuseUnsupported(const Fields& fields, const ModelConfig& config) {
  for (const char* name : {"attention_bias", "mlp_bias", "qk_norm", "use_qk_norm"}) {
    KVT_ASSIGN_OR_RETURN(const bool on, fields.Bool(name, false));
    if (on) return fields.Unsupported(name, "only false is supported");
  }
  for (const char* name : {"rope_scaling", "quantization_config", "compression_config"}) {
    if (fields.Find(name) != nullptr) return fields.Unsupported(name, "only null is supported");
  }
  const json* act = fields.Find("hidden_act");
  if (act != nullptr && *act != "silu")
    return fields.Unsupported("hidden_act", "only silu is supported");
  const json* partial = fields.Find("partial_rotary_factor");
  if (partial != nullptr && *partial != 1) {
    return fields.Unsupported("partial_rotary_factor", "only 1 is supported");
  }
  return RefuseWindow(fields, config);
}

// rope_theta stands at the top, or (transformers 5) in rope_parameters.
absl::StatusOr<double> RopeTheta(const Fields& fields, const std::string& file) {
  constexpr double kDefault = 10000, kMax = 1e12;
  const json* parameters = fields.Find("rope_parameters");
  if (parameters == nullptr) return fields.Positive("rope_theta", kDefault, kMax);
  if (!parameters->is_object()) return fields.Invalid("rope_parameters", "is not an object");
  const auto type = parameters->find("rope_type");
  if (type != parameters->end() && *type != "default") {
    return fields.Unsupported("rope_parameters", "only rope_type default is supported");
  }
  return Fields(*parameters, absl::StrCat(file, ": rope_parameters"))
      .Positive("rope_theta", kDefault, kMax);
}

// An id, a list of ids, or nothing; added to `ids`.
absl::Status AddIds(const Fields& fields, const std::string& name, int vocab,
                    std::vector<int32_t>& ids) {
  const json* value = fields.Find(name);
  if (value == nullptr) return absl::OkStatus();
  const json list = value->is_array() ? *value : json::array({*value});
  if (list.size() > kEosIdsMax) return fields.Invalid(name, "lists too many ids");
  for (const json& id : list) {
    if (!id.is_number_integer() || id < 0 || id >= vocab) {
      return fields.Invalid(name,
                            absl::StrCat("holds ", id.dump(), ", not a token id below ", vocab));
    }
    ids.push_back(id.get<int32_t>());
  }
  return absl::OkStatus();
}

absl::Status ReadSizes(const Fields& fields, ModelConfig& config) {
  KVT_ASSIGN_OR_RETURN(config.layers, fields.Int("num_hidden_layers", 1, 256));
  KVT_ASSIGN_OR_RETURN(config.hidden, fields.Int("hidden_size", 1, kHiddenMax));
  KVT_ASSIGN_OR_RETURN(config.intermediate, fields.Int("intermediate_size", 1, kIntermediateMax));
  KVT_ASSIGN_OR_RETURN(config.heads, fields.Int("num_attention_heads", 1, kHeadsMax));
  KVT_ASSIGN_OR_RETURN(config.kv_heads,
                       fields.Int("num_key_value_heads", 1, config.heads, config.heads));
  if (config.heads % config.kv_heads != 0) {
    return fields.Invalid("num_key_value_heads",
                          absl::StrCat("is ", config.kv_heads, ", which does not divide ",
                                       config.heads, " num_attention_heads"));
  }
  if (fields.Find("head_dim") == nullptr && config.hidden % config.heads != 0) {
    return fields.Invalid("head_dim",
                          "is missing and hidden_size / num_attention_heads is no integer");
  }
  KVT_ASSIGN_OR_RETURN(config.head_dim,
                       fields.Int("head_dim", 1, 1024, config.hidden / config.heads));
  KVT_ASSIGN_OR_RETURN(config.vocab, fields.Int("vocab_size", 1, kVocabMax));
  KVT_ASSIGN_OR_RETURN(config.context_tokens,
                       fields.Int("max_position_embeddings", 1, kPositionsMax));
  const absl::Status geometry = config.KvGeometry().Validate();
  if (!geometry.ok()) return fields.Invalid("head_dim", geometry.message());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> LoadModelConfig(absl::string_view folder) {
  const std::string path = absl::StrCat(folder, "/config.json");
  KVT_ASSIGN_OR_RETURN(const json object, ReadJsonObject(path));
  const Fields fields(object, path);
  ModelConfig config;
  KVT_RETURN_IF_ERROR(ReadArchitecture(fields, config));
  KVT_RETURN_IF_ERROR(ReadSizes(fields, config));
  KVT_RETURN_IF_ERROR(RefuseUnsupported(fields, config));
  KVT_ASSIGN_OR_RETURN(config.rope_theta, RopeTheta(fields, path));
  KVT_ASSIGN_OR_RETURN(config.rms_norm_eps, fields.Positive("rms_norm_eps", 1e-6, 1));
  KVT_ASSIGN_OR_RETURN(config.tied_embeddings, fields.Bool("tie_word_embeddings", false));

  std::vector<int32_t> bos;
  KVT_RETURN_IF_ERROR(AddIds(fields, "bos_token_id", config.vocab, bos));
  if (!bos.empty()) config.bos_id = bos.front();
  KVT_RETURN_IF_ERROR(AddIds(fields, "eos_token_id", config.vocab, config.eos_ids));
  const std::string generation_path = absl::StrCat(folder, "/generation_config.json");
  absl::StatusOr<json> generation = ReadJsonObject(generation_path);
  if (generation.ok()) {
    KVT_RETURN_IF_ERROR(
        AddIds(Fields(*generation, generation_path), "eos_token_id", config.vocab, config.eos_ids));
  } else if (!absl::IsNotFound(generation.status())) {
    return generation.status();
  }
  std::sort(config.eos_ids.begin(), config.eos_ids.end());
  config.eos_ids.erase(std::unique(config.eos_ids.begin(), config.eos_ids.end()),
                       config.eos_ids.end());
  return config;
}

}  // namespace kvt
