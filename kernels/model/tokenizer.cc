#include "kernels/model/tokenizer.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/model/tokenizer_file.h"
#include "kernels/model/unicode_nfc.h"

namespace kvt {
namespace {

// Words up to this length are looked up before they are merged; longer ones seldom come twice.
constexpr size_t kCachedWordBytesMax = 64;

}  // namespace

// One Encode: its output, and the words it has met already as ranges of that output.
struct EncodeState {
  std::deque<std::string> normalized;  // texts that differ from what was given; words point there
  std::vector<int32_t> ids;
  std::vector<absl::string_view> words;
  TokenizerBpe::Scratch scratch;
  struct Range {
    size_t begin, count;
  };
  absl::flat_hash_map<absl::string_view, Range> seen;
};

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(absl::string_view folder) {
  const std::string path = absl::StrCat(folder, "/tokenizer.json");
  KVT_ASSIGN_OR_RETURN(TokenizerFile file, ReadTokenizerFile(path));
  const auto in_file = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
  };
  absl::StatusOr<TokenizerSplit> split = TokenizerSplit::Create(file.split_patterns);
  if (!split.ok()) return in_file(split.status());
  absl::StatusOr<TokenizerBpe> bpe =
      TokenizerBpe::Create(file.word_bytes, file.merges, file.ignore_merges);
  if (!bpe.ok()) return in_file(bpe.status());
  return std::unique_ptr<Tokenizer>(
      new Tokenizer(std::move(file), *std::move(split), *std::move(bpe)));
}

Tokenizer::Tokenizer(TokenizerFile file, TokenizerSplit split, TokenizerBpe bpe)
    : token_bytes_(std::move(file.token_bytes)),
      special_(token_bytes_.size(), false),
      prefix_ids_(std::move(file.prefix_ids)),
      nfc_(file.nfc),
      split_(std::move(split)),
      bpe_(std::move(bpe)) {
  for (const AddedToken& added : file.added) {
    if (added.special) special_[added.id] = true;
    added_[added.content] = added.id;
    (added.normalized ? normalized_added_ : raw_added_).Add(added.content, added.id, added.special);
  }
}

absl::Status Tokenizer::EncodeText(absl::string_view text, EncodeState& state) const {
  state.words.clear();
  KVT_RETURN_IF_ERROR(split_.Split(text, state.words));
  for (const absl::string_view word : state.words) {
    const bool cached = word.size() <= kCachedWordBytesMax;
    if (cached) {
      const auto it = state.seen.find(word);
      if (it != state.seen.end()) {
        const auto [begin, count] = it->second;
        for (size_t i = 0; i < count; ++i) state.ids.push_back(int32_t{state.ids[begin + i]});
        continue;
      }
    }
    const size_t begin = state.ids.size();
    bpe_.Encode(word, state.scratch, state.ids);
    if (cached) state.seen.emplace(word, EncodeState::Range{begin, state.ids.size() - begin});
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::EncodeRaw(absl::string_view text, SpecialTokens special,
                                  EncodeState& state) const {
  if (nfc_) {
    std::string room;
    const absl::string_view normal = ToNfc(text, room);
    if (normal.data() != text.data()) {
      state.normalized.push_back(std::move(room));
      text = state.normalized.back();
    }
  }
  return normalized_added_.Cut(
      text, special, [&](absl::string_view rest) { return EncodeText(rest, state); },
      [&](int32_t id) { state.ids.push_back(id); });
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(absl::string_view text,
                                                       SpecialTokens special) const {
  if (text.size() > kEncodeBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("text has ", text.size(), " bytes; ", kEncodeBytesMax, " at most"));
  }
  const size_t valid = ValidUtf8Prefix(text);
  if (valid < text.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "text is not UTF-8: byte 0x", absl::Hex(static_cast<uint8_t>(text[valid]), absl::kZeroPad2),
        " at offset ", valid));
  }
  EncodeState state;
  KVT_RETURN_IF_ERROR(raw_added_.Cut(
      text, special, [&](absl::string_view rest) { return EncodeRaw(rest, special, state); },
      [&](int32_t id) { state.ids.push_back(id); }));
  return std::move(state.ids);
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids, Special special) const {
  TokenStream stream(*this, special);
  std::string text;
  for (const int32_t id : ids) text += stream.Append(id);
  return text + stream.Finish();
}

absl::string_view Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= size()) return {};
  return token_bytes_[id];
}

bool Tokenizer::IsSpecial(int32_t id) const { return id >= 0 && id < size() && special_[id]; }

std::optional<int32_t> Tokenizer::FindAdded(absl::string_view content) const {
  const auto it = added_.find(content);
  if (it == added_.end()) return std::nullopt;
  return it->second;
}

std::string TokenStream::Append(int32_t id) {
  if (special_ == Tokenizer::Special::kSkip && tokenizer_.IsSpecial(id)) return {};
  return text_.Append(tokenizer_.TokenBytes(id));
}

}  // namespace kvt
