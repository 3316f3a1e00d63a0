// The prompt of a conversation. ChatML is the one template known:
//   <|im_start|>ROLE\nCONTENT<|im_end|>\n ... <|im_start|>assistant\n
// A folder's own template is a Jinja program; which ones are ChatML is found by their text, without
// an interpreter, and every other is refused.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/model/tokenizer.h"

namespace kvt {

struct ChatMessage {
  std::string role;     // "system", "user" or "assistant"
  std::string content;  // UTF-8
};

// Immutable, thread-safe.
class ChatTemplate {
 public:
  // Reads folder/tokenizer_config.json (or chat_template.jinja, where newer folders keep it).
  // NotFound: there is none; Unimplemented: not ChatML, naming the file.
  static absl::StatusOr<ChatTemplate> Load(absl::string_view folder);

  // The prompt, ending where the assistant's answer begins. The default system message is put
  // first when the conversation starts with another role. InvalidArgument: no message, or a role
  // that is none of the three.
  absl::StatusOr<std::string> Render(absl::Span<const ChatMessage> messages) const;

  // The same as token ids. The template's own markers become special tokens; what stands in the
  // contents never does, so a user cannot end his turn and speak as somebody else.
  absl::StatusOr<std::vector<int32_t>> Encode(const Tokenizer& tokenizer,
                                              absl::Span<const ChatMessage> messages) const;

  // Empty when the template has none.
  const std::string& default_system() const { return default_system_; }

 private:
  explicit ChatTemplate(std::string default_system) : default_system_(std::move(default_system)) {}
  absl::StatusOr<std::vector<ChatMessage>> WithSystem(absl::Span<const ChatMessage> messages) const;

  std::string default_system_;
};

}  // namespace kvt
