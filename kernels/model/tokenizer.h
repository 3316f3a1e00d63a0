// Text to token ids and back, as the tokenizers library does it with the same tokenizer.json:
// byte-level BPE (the family of GPT-2, Llama 3, SmolLM, Qwen). Added tokens are cut out first
// (leftmost, longest), the rest is normalised, added tokens with normalized=true are cut out of
// that, the rest is split into words by the pre-tokenizer's expressions, each word is merged.
//
// Supported: pre_tokenizer Digits, ByteLevel, Split (Isolated) and Sequences of them; normalizer
// null and NFC; decoder ByteLevel; post_processor null, ByteLevel, or a TemplateProcessing that
// puts tokens before the text. Anything else is refused by name when the file is loaded.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/model/tokenizer_added.h"
#include "kernels/model/tokenizer_bpe.h"
#include "kernels/model/tokenizer_split.h"
#include "kernels/model/utf8.h"

namespace kvt {

// Longest text of one Encode; far more than the longest sequence holds.
inline constexpr size_t kEncodeBytesMax = size_t{32} << 20;

// What has been read of a tokenizer.json (tokenizer_file.h).
struct TokenizerFile;

// Immutable after Load, thread-safe.
class Tokenizer {
 public:
  // Reads folder/tokenizer.json. NotFound; InvalidArgument or Unimplemented naming file and field.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(absl::string_view folder);

  // InvalidArgument: not UTF-8, with the byte's offset, or longer than kEncodeBytesMax. Empty text
  // gives no ids. Does not add prefix_ids().
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text, SpecialTokens special) const;

  // The text of the ids (normalised where Encode did it), valid UTF-8: what is not becomes U+FFFD.
  // Ids without a token give nothing; with kSkip neither do special tokens.
  enum class Special : uint8_t { kKeep, kSkip };
  std::string Decode(absl::Span<const int32_t> ids, Special special) const;

  // Bytes of one token, which may be part of a character. Empty for an id without a token.
  absl::string_view TokenBytes(int32_t id) const;
  bool IsSpecial(int32_t id) const;
  // The id of an added token with exactly this content.
  std::optional<int32_t> FindAdded(absl::string_view content) const;
  // One more than the highest id; the model's vocabulary may be larger.
  int size() const { return static_cast<int>(token_bytes_.size()); }
  // What the post_processor puts before a text (Llama 3: <|begin_of_text|>); usually nothing.
  const std::vector<int32_t>& prefix_ids() const { return prefix_ids_; }

 private:
  Tokenizer(TokenizerFile file, TokenizerSplit split, TokenizerBpe bpe);
  // The last two steps of Encode: what stands between the added tokens of the text as it is, and
  // between those of the normalised text.
  absl::Status EncodeRaw(absl::string_view text, SpecialTokens special,
                         struct EncodeState& state) const;
  absl::Status EncodeText(absl::string_view text, EncodeState& state) const;

  std::vector<std::string> token_bytes_;
  std::vector<bool> special_;
  std::vector<int32_t> prefix_ids_;
  absl::flat_hash_map<std::string, int32_t> added_;
  TokenizerAdded raw_added_, normalized_added_;  // of the text before and after normalisation
  bool nfc_;
  TokenizerSplit split_;
  TokenizerBpe bpe_;
};

// The text of a growing sequence of ids: gives out whole characters only. The concatenation of all
// results equals Decode of all ids. One owner; refers to the tokenizer.
class TokenStream {
 public:
  TokenStream(const Tokenizer& tokenizer, Tokenizer::Special special)
      : tokenizer_(tokenizer), special_(special) {}

  [[nodiscard]] std::string Append(int32_t id);
  // What was held back, at the end of the sequence.
  [[nodiscard]] std::string Finish() { return text_.Finish(); }

 private:
  const Tokenizer& tokenizer_;
  const Tokenizer::Special special_;
  Utf8Stream text_;
};

}  // namespace kvt
