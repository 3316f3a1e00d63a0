#include "kernels/model/chat_template.h"

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"
#include "kernels/model/json_file.h"

namespace kvt {
namespace {

using nlohmann::json;

constexpr char kStart[] = "<|im_start|>";
constexpr char kEnd[] = "<|im_end|>";
constexpr size_t kTemplateBytesMax = size_t{64} << 10;

// ChatML in the form that Canonical gives: literals between \1 and \2, nothing blank outside them.
constexpr absl::string_view kLoop = "{%formessageinmessages%}";
constexpr absl::string_view kDefaultBegin =
    "{%ifloop.firstandmessages[0][\1role\2]!=\1system\2%}{{\1<|im_start|>system\n";
constexpr absl::string_view kDefaultEnd = "<|im_end|>\n\2}}{%endif%}";
constexpr absl::string_view kTurns =
    "{{\1<|im_start|>\2+message[\1role\2]+\1\n\2+message[\1content\2]+\1<|im_end|>\n\2}}{%endfor%}"
    "{%ifadd_generation_prompt%}{{\1<|im_start|>assistant\n\2}}{%endif%}";

// Appends the literal that begins after its quote and consumes it, closing quote included. False
// when it does not end or has another escape than \n.
bool CopyLiteral(char quote, absl::string_view& rest, std::string& out) {
  out += '\1';
  while (!rest.empty() && rest[0] != quote) {
    if (absl::ConsumePrefix(&rest, "\\n")) {
      out += '\n';
      continue;
    }
    if (rest[0] == '\\') return false;
    out += rest[0];
    rest.remove_prefix(1);
  }
  if (rest.empty()) return false;
  rest.remove_prefix(1);
  out += '\2';
  return true;
}

// Appends the tag, {{ }} or {% %}, that `rest` begins with and consumes it; `trims` when it ends in
// a minus, which takes the blanks after it away.
bool CopyTag(absl::string_view& rest, std::string& out, bool& trims) {
  const absl::string_view close = rest[1] == '%' ? "%}" : "}}";
  absl::StrAppend(&out, rest.substr(0, 2));
  rest.remove_prefix(rest.size() > 2 && rest[2] == '-' ? 3 : 2);
  while (!rest.empty()) {
    trims = rest[0] == '-' && absl::StartsWith(rest.substr(1), close);
    if (trims) rest.remove_prefix(1);
    if (absl::ConsumePrefix(&rest, close)) {
      absl::StrAppend(&out, close);
      return true;
    }
    const char c = rest[0];
    rest.remove_prefix(1);
    if (c == '\'' || c == '"') {
      if (!CopyLiteral(c, rest, out)) return false;
    } else if (!absl::ascii_isspace(static_cast<unsigned char>(c))) {
      out += c;
    }
  }
  return false;
}

bool StartsTag(absl::string_view text) {
  return absl::StartsWith(text, "{{") || absl::StartsWith(text, "{%");
}

// The template without what does not matter: blanks in tags, blanks between tags that Jinja (with
// transformers' trim_blocks and lstrip_blocks) drops, kinds of quotes, + between literals. Nothing
// for what the forms above cannot be.
std::optional<std::string> Canonical(absl::string_view rest) {
  std::string out;
  bool trims = false;
  while (!rest.empty()) {
    size_t blanks = 0;
    while (blanks < rest.size() && absl::ascii_isspace(static_cast<unsigned char>(rest[blanks])))
      ++blanks;
    const absl::string_view between = rest.substr(0, blanks);
    const absl::string_view next = rest.substr(blanks);
    const bool next_trims = next.size() > 2 && next[2] == '-';
    const bool block_line = absl::EndsWith(out, "%}") && absl::StartsWith(between, "\n") &&
                            (blanks == 1 || absl::StartsWith(next, "{%")) &&
                            !absl::StrContains(between.substr(1), '\n');
    if (!between.empty() && !trims && !next_trims && !block_line && !next.empty())
      return std::nullopt;
    rest = next;
    if (rest.empty()) break;
    if (!StartsTag(rest) || !CopyTag(rest, out, trims)) return std::nullopt;
  }
  return absl::StrReplaceAll(out, {{"\2+\1", ""},
                                   {"message.role", "message[\1role\2]"},
                                   {"message.content", "message[\1content\2]"}});
}

// The default system message, perhaps empty, of a template that is ChatML.
std::optional<std::string> ChatMlSystem(absl::string_view text) {
  const std::optional<std::string> canonical = Canonical(text);
  if (!canonical.has_value()) return std::nullopt;
  absl::string_view rest = *canonical;
  if (!absl::ConsumePrefix(&rest, kLoop) || !absl::ConsumeSuffix(&rest, kTurns))
    return std::nullopt;
  if (rest.empty()) return std::string();
  if (!absl::ConsumePrefix(&rest, kDefaultBegin) || !absl::ConsumeSuffix(&rest, kDefaultEnd)) {
    return std::nullopt;
  }
  if (absl::StrContains(rest, '\2')) return std::nullopt;
  return std::string(rest);
}

// chat_template of the config: a text, or a list of named ones of which "default" is meant.
std::optional<std::string> TemplateText(const json& config) {
  const auto it = config.find("chat_template");
  if (it == config.end()) return std::nullopt;
  if (it->is_string()) return it->get<std::string>();
  if (!it->is_array()) return std::nullopt;
  for (const json& named : *it) {
    if (named.is_object() && named.value("name", json()) == "default" &&
        named.value("template", json()).is_string()) {
      return named["template"].get<std::string>();
    }
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<ChatTemplate> ChatTemplate::Load(absl::string_view folder) {
  std::string path = absl::StrCat(folder, "/chat_template.jinja");
  std::optional<std::string> text;
  absl::StatusOr<std::string> jinja = ReadModelFile(path);
  if (jinja.ok()) {
    text = *std::move(jinja);
  } else {
    path = absl::StrCat(folder, "/tokenizer_config.json");
    KVT_ASSIGN_OR_RETURN(const json config, ReadJsonObject(path));
    text = TemplateText(config);
  }
  if (!text.has_value()) {
    return absl::NotFoundError(absl::StrCat(path, ": field chat_template is missing"));
  }
  std::optional<std::string> system;
  if (text->size() <= kTemplateBytesMax) system = ChatMlSystem(*text);
  if (!system.has_value()) {
    return absl::UnimplementedError(absl::StrCat(
        path,
        ": field chat_template is not ChatML, the only template supported (a model whose plain "
        "conversations are ChatML needs a chat_template.jinja: docs/MODELS.md); it begins with ",
        json(absl::StrCat(absl::string_view(*text).substr(0, 80)))
            .dump(-1, ' ', false, json::error_handler_t::replace)));
  }
  return ChatTemplate(*std::move(system));
}

absl::StatusOr<std::vector<ChatMessage>> ChatTemplate::WithSystem(
    absl::Span<const ChatMessage> messages) const {
  if (messages.empty()) return absl::InvalidArgumentError("chat: no message");
  for (const ChatMessage& message : messages) {
    if (message.role != "system" && message.role != "user" && message.role != "assistant") {
      return absl::InvalidArgumentError(
          absl::StrCat("chat: role \"", message.role, "\" is none of system, user, assistant"));
    }
  }
  std::vector<ChatMessage> all;
  if (!default_system_.empty() && messages.front().role != "system") {
    all.push_back({"system", default_system_});
  }
  all.insert(all.end(), messages.begin(), messages.end());
  return all;
}

absl::StatusOr<std::string> ChatTemplate::Render(absl::Span<const ChatMessage> messages) const {
  KVT_ASSIGN_OR_RETURN(const std::vector<ChatMessage> all, WithSystem(messages));
  std::string prompt;
  for (const ChatMessage& message : all) {
    absl::StrAppend(&prompt, kStart, message.role, "\n", message.content, kEnd, "\n");
  }
  absl::StrAppend(&prompt, kStart, "assistant\n");
  return prompt;
}

absl::StatusOr<std::vector<int32_t>> ChatTemplate::Encode(
    const Tokenizer& tokenizer, absl::Span<const ChatMessage> messages) const {
  KVT_ASSIGN_OR_RETURN(const std::vector<ChatMessage> all, WithSystem(messages));
  const std::optional<int32_t> start = tokenizer.FindAdded(kStart), end = tokenizer.FindAdded(kEnd);
  if (!start.has_value() || !end.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("chat: the tokenizer has no tokens ", kStart, " and ", kEnd));
  }
  std::vector<int32_t> ids = tokenizer.prefix_ids();
  const auto add_text = [&](absl::string_view text) -> absl::Status {
    KVT_ASSIGN_OR_RETURN(const std::vector<int32_t> more,
                         tokenizer.Encode(text, SpecialTokens::kAsText));
    ids.insert(ids.end(), more.begin(), more.end());
    return absl::OkStatus();
  };
  for (const ChatMessage& message : all) {
    ids.push_back(*start);
    // One text, so that words form across the line break as in the rendered prompt.
    KVT_RETURN_IF_ERROR(add_text(absl::StrCat(message.role, "\n", message.content)));
    ids.push_back(*end);
    KVT_RETURN_IF_ERROR(add_text("\n"));
  }
  ids.push_back(*start);
  KVT_RETURN_IF_ERROR(add_text("assistant\n"));
  return ids;
}

}  // namespace kvt
