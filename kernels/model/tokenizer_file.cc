#include "kernels/model/tokenizer_file.h"

#include <array>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/base/check.h"
#include "kernels/model/json_file.h"
#include "kernels/model/unicode_nfc.h"

namespace kvt {
namespace {

using nlohmann::json;

constexpr int32_t kTokenIdMax = (1 << 20) - 1;
constexpr int kSequenceDepthMax = 8;
// The expression that ByteLevel applies with use_regex (GPT-2's).
constexpr char kByteLevelPattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

absl::Status Invalid(absl::string_view field, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("field ", field, " ", what));
}
absl::Status Unsupported(absl::string_view field, const json& value, absl::string_view supported) {
  return absl::UnimplementedError(absl::StrCat(
      "field ", field, " is ", absl::string_view(value.dump()).substr(0, 200), "; ", supported));
}

const json& At(const json& object, const char* name) {
  static const json kNull;
  if (!object.is_object()) return kNull;
  const auto it = object.find(name);
  return it == object.end() ? kNull : *it;
}
bool IsTrue(const json& value) { return value.is_boolean() && value.get<bool>(); }
std::string TypeOf(const json& value) {
  const json& type = At(value, "type");
  return type.is_string() ? type.get<std::string>() : "";
}

// GPT-2's printable stand-ins: bytes 33-126, 161-172 and 174-255 are their own code points, the
// others are U+0100 and on, in order. Index: code point.
std::array<int, 324> ByteOfCodePoint() {
  std::array<int, 324> bytes;
  bytes.fill(-1);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool own = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    bytes[own ? byte : next++] = byte;
  }
  return bytes;
}

// The bytes that a vocabulary entry stands for; nullopt when it has other characters.
std::optional<std::string> BytesOfToken(absl::string_view token) {
  static const std::array<int, 324> kBytes = ByteOfCodePoint();
  std::string bytes;
  for (size_t i = 0; i < token.size(); ++i) {
    const auto lead = static_cast<uint8_t>(token[i]);
    size_t code_point = lead;
    if (lead >= 0x80) {  // all stand-ins have two bytes; the text is valid UTF-8
      if (lead >= 0xE0 || i + 1 == token.size()) return std::nullopt;
      code_point = (lead & 0x1Fu) << 6 | (static_cast<uint8_t>(token[++i]) & 0x3Fu);
    }
    if (code_point >= kBytes.size() || kBytes[code_point] < 0) return std::nullopt;
    bytes += static_cast<char>(kBytes[code_point]);
  }
  return bytes;
}

absl::StatusOr<int32_t> TokenId(const json& value, absl::string_view field) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > kTokenIdMax) {
    return Invalid(field, absl::StrCat("has id ", value.dump(), ", not in [0, ", kTokenIdMax, "]"));
  }
  return value.get<int32_t>();
}

void SetToken(std::vector<std::string>& tokens, int32_t id, std::string bytes) {
  if (tokens.size() <= static_cast<size_t>(id)) tokens.resize(id + 1);
  tokens[id] = std::move(bytes);
}

absl::Status ReadAddedTokens(const json& list, TokenizerFile& file) {
  if (list.is_null()) return absl::OkStatus();
  if (!list.is_array()) return Invalid("added_tokens", "is not a list");
  for (const json& token : list) {
    const json& content = At(token, "content");
    if (!content.is_string() || content.get_ref<const std::string&>().empty()) {
      return Invalid("added_tokens", "has an entry without content");
    }
    AddedToken added;
    added.content = content.get<std::string>();
    const std::string field = absl::StrCat("added_tokens: ", added.content);
    KVT_ASSIGN_OR_RETURN(added.id, TokenId(At(token, "id"), field));
    for (const char* name : {"single_word", "lstrip", "rstrip"}) {
      if (IsTrue(At(token, name))) {
        return Unsupported(absl::StrCat(field, ": ", name), true, "only false is supported");
      }
    }
    added.special = IsTrue(At(token, "special"));
    const json& normalized = At(token, "normalized");
    added.normalized = normalized.is_null() ? !added.special : IsTrue(normalized);
    if (added.normalized && file.nfc) {
      std::string room;
      const absl::string_view normal = ToNfc(added.content, room);
      if (normal.data() == room.data()) added.content = std::move(room);
    }
    file.added.push_back(std::move(added));
  }
  return absl::OkStatus();
}

absl::Status ReadModel(const json& model, TokenizerFile& file) {
  const json& type = At(model, "type");
  if (type != "BPE") return Unsupported("model.type", type, "only BPE is supported");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json& value = At(model, name);
    if (!value.is_null() && value != "") {
      return Unsupported(absl::StrCat("model.", name), value, "only null is supported");
    }
  }
  const json& dropout = At(model, "dropout");
  if (!dropout.is_null() && dropout != 0) {
    return Unsupported("model.dropout", dropout, "only null is supported");
  }
  if (IsTrue(At(model, "byte_fallback"))) {
    return Unsupported("model.byte_fallback", true, "only false is supported");
  }
  file.ignore_merges = IsTrue(At(model, "ignore_merges"));

  const json& vocab = At(model, "vocab");
  if (!vocab.is_object() || vocab.empty())
    return Invalid("model.vocab", "is missing, empty or no object");
  absl::flat_hash_map<std::string, int32_t> ids;
  ids.reserve(vocab.size());
  for (const auto& [token, value] : vocab.items()) {
    KVT_ASSIGN_OR_RETURN(const int32_t id, TokenId(value, absl::StrCat("model.vocab: ", token)));
    std::optional<std::string> bytes = BytesOfToken(token);
    if (static_cast<size_t>(id) < file.token_bytes.size() && !file.token_bytes[id].empty()) {
      return Invalid("model.vocab", absl::StrCat("has id ", id, " twice"));
    }
    SetToken(file.token_bytes, id, bytes.value_or(token));
    SetToken(file.word_bytes, id, bytes.value_or(""));
    ids.emplace(token, id);
  }

  const json& merges = At(model, "merges");
  if (!merges.is_array()) return Invalid("model.merges", "is missing or no list");
  file.merges.reserve(merges.size());
  for (size_t i = 0; i < merges.size(); ++i) {
    const json& merge = merges[i];
    std::string left, right;
    if (merge.is_string()) {
      const auto& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space != std::string::npos) {
        left = text.substr(0, space);
        right = text.substr(space + 1);
      }
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    }
    const auto left_id = ids.find(left), right_id = ids.find(right);
    if (left_id == ids.end() || right_id == ids.end()) {
      return Invalid(absl::StrCat("model.merges[", i, "]"),
                     absl::StrCat("is ", merge.dump(), ", not two tokens of vocab"));
    }
    file.merges.push_back({left_id->second, right_id->second});
  }
  return absl::OkStatus();
}

absl::Status AddSplitPattern(const json& step, std::vector<std::string>& patterns) {
  const json& behavior = At(step, "behavior");
  if (behavior != "Isolated") {
    return Unsupported("pre_tokenizer: Split: behavior", behavior, "only Isolated is supported");
  }
  if (IsTrue(At(step, "invert"))) {
    return Unsupported("pre_tokenizer: Split: invert", true, "only false is supported");
  }
  const json& regex = At(At(step, "pattern"), "Regex");
  const json& text = At(At(step, "pattern"), "String");
  if (regex.is_string()) {
    patterns.push_back(regex.get<std::string>());
  } else if (text.is_string() && !absl::StrContains(text.get_ref<const std::string&>(), "\\E")) {
    patterns.push_back(absl::StrCat("\\Q", text.get_ref<const std::string&>(), "\\E"));
  } else {
    return Invalid("pre_tokenizer: Split: pattern", "is neither a Regex nor a String");
  }
  return absl::OkStatus();
}

// Appends the patterns of `step`; `has_byte_level` when a ByteLevel has been seen.
absl::Status ReadPreTokenizer(const json& step, int depth, bool& has_byte_level,
                              std::vector<std::string>& patterns) {
  const std::string type = TypeOf(step);
  if (type == "Sequence" && depth < kSequenceDepthMax) {
    const json& list = At(step, "pretokenizers");
    if (!list.is_array()) return Invalid("pre_tokenizer: Sequence: pretokenizers", "is no list");
    for (const json& inner : list) {
      KVT_RETURN_IF_ERROR(ReadPreTokenizer(inner, depth + 1, has_byte_level, patterns));
    }
    return absl::OkStatus();
  }
  if (has_byte_level)
    return Invalid("pre_tokenizer", absl::StrCat("has ", type, " after ByteLevel"));
  if (type == "Digits") {
    patterns.push_back(IsTrue(At(step, "individual_digits")) ? "\\p{N}" : "\\p{N}+");
  } else if (type == "Split") {
    return AddSplitPattern(step, patterns);
  } else if (type == "ByteLevel") {
    if (IsTrue(At(step, "add_prefix_space"))) {
      return Unsupported("pre_tokenizer: ByteLevel: add_prefix_space", true,
                         "only false is supported");
    }
    const json& use_regex = At(step, "use_regex");
    if (use_regex.is_null() || IsTrue(use_regex)) patterns.push_back(kByteLevelPattern);
    has_byte_level = true;
  } else {
    return Unsupported("pre_tokenizer", step,
                       "Digits, ByteLevel, Split and Sequences of them are supported");
  }
  return absl::OkStatus();
}

// The ids that a TemplateProcessing puts before the text.
absl::Status ReadTemplate(const json& processor, TokenizerFile& file) {
  const json& single = At(processor, "single");
  if (!single.is_array()) return Invalid("post_processor: single", "is missing or no list");
  bool after_text = false;
  for (const json& part : single) {
    const json& id = At(At(part, "SpecialToken"), "id");
    if (At(part, "Sequence").is_object()) {
      after_text = true;
    } else if (after_text || !id.is_string()) {
      return Unsupported("post_processor: single", single,
                         "only tokens before the text are supported");
    } else {
      const json& ids =
          At(At(At(processor, "special_tokens"), id.get<std::string>().c_str()), "ids");
      if (!ids.is_array()) {
        return Invalid("post_processor: special_tokens",
                       absl::StrCat("has no ids for ", id.dump()));
      }
      for (const json& value : ids) {
        KVT_ASSIGN_OR_RETURN(const int32_t number, TokenId(value, "post_processor"));
        file.prefix_ids.push_back(number);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status ReadPostProcessor(const json& processor, int depth, TokenizerFile& file) {
  const std::string type = TypeOf(processor);
  if (processor.is_null() || type == "ByteLevel") return absl::OkStatus();  // moves offsets only
  if (type == "TemplateProcessing") return ReadTemplate(processor, file);
  if (type == "Sequence" && depth < kSequenceDepthMax && At(processor, "processors").is_array()) {
    for (const json& inner : At(processor, "processors")) {
      KVT_RETURN_IF_ERROR(ReadPostProcessor(inner, depth + 1, file));
    }
    return absl::OkStatus();
  }
  return Unsupported("post_processor", processor,
                     "null, ByteLevel and TemplateProcessing are supported");
}

absl::StatusOr<TokenizerFile> ReadTokenizer(const json& top) {
  TokenizerFile file;
  const json& normalizer = At(top, "normalizer");
  file.nfc = TypeOf(normalizer) == "NFC";
  if (!normalizer.is_null() && !file.nfc) {
    return Unsupported("normalizer", normalizer, "only null and NFC are supported");
  }
  KVT_RETURN_IF_ERROR(ReadModel(At(top, "model"), file));
  KVT_RETURN_IF_ERROR(ReadAddedTokens(At(top, "added_tokens"), file));
  bool has_byte_level = false;
  KVT_RETURN_IF_ERROR(
      ReadPreTokenizer(At(top, "pre_tokenizer"), 0, has_byte_level, file.split_patterns));
  if (!has_byte_level) {
    return Unsupported("pre_tokenizer", At(top, "pre_tokenizer"),
                       "one that ends in ByteLevel is needed");
  }
  const json& decoder = At(top, "decoder");
  if (TypeOf(decoder) != "ByteLevel") {
    return Unsupported("decoder", decoder, "only ByteLevel is supported");
  }
  KVT_RETURN_IF_ERROR(ReadPostProcessor(At(top, "post_processor"), 0, file));
  for (const AddedToken& added : file.added) {
    std::string bytes = BytesOfToken(added.content).value_or(added.content);
    if (static_cast<size_t>(added.id) < file.token_bytes.size() &&
        !file.token_bytes[added.id].empty() && file.token_bytes[added.id] != bytes) {
      return Invalid(absl::StrCat("added_tokens: ", added.content),
                     absl::StrCat("has id ", added.id, ", which another token has"));
    }
    SetToken(file.token_bytes, added.id, std::move(bytes));
  }
  file.word_bytes.resize(file.token_bytes.size());
  return file;
}

}  // namespace

absl::StatusOr<TokenizerFile> ReadTokenizerFile(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(const json top, ReadJsonObject(path));
  absl::StatusOr<TokenizerFile> file = ReadTokenizer(top);
  if (!file.ok()) {
    return absl::Status(file.status().code(), absl::StrCat(path, ": ", file.status().message()));
  }
  return file;
}

}  // namespace kvt
