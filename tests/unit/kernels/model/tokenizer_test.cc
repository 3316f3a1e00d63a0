#include "kernels/model/tokenizer.h"

#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "nlohmann/json.hpp"
#include "tests/support/model_folder.h"

namespace kvt {
namespace {

using nlohmann::json;

constexpr char kGoldens[] = KVT_SOURCE_DIR "/tests/support/goldens/";

json ReadGoldens(const std::string& name) { return json::parse(std::ifstream(kGoldens + name)); }

std::vector<int32_t> Ids(const json& list) { return list.get<std::vector<int32_t>>(); }

// Every text and every broken sequence of ids of a golden file, both ways, at once and streamed.
void CheckGoldens(const Tokenizer& tokenizer, const json& goldens) {
  ASSERT_FALSE(goldens["cases"].empty());
  for (const json& golden : goldens["cases"]) {
    SCOPED_TRACE(golden["name"].dump());
    const auto text = golden["text"].get<std::string>();
    const auto ids = tokenizer.Encode(text, SpecialTokens::kParse);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, Ids(golden["ids"]));
    const auto as_text = tokenizer.Encode(text, SpecialTokens::kAsText);
    ASSERT_TRUE(as_text.ok()) << as_text.status();
    EXPECT_EQ(*as_text,
              Ids(golden.contains("ids_as_text") ? golden["ids_as_text"] : golden["ids"]));
    EXPECT_EQ(tokenizer.Decode(*ids, Tokenizer::Special::kKeep), golden.value("decoded", text));
    TokenStream stream(tokenizer, Tokenizer::Special::kKeep);
    std::string streamed;
    for (const int32_t id : *ids) {
      const std::string piece = stream.Append(id);
      EXPECT_EQ(ValidUtf8Prefix(piece), piece.size());
      streamed += piece;
    }
    EXPECT_EQ(streamed + stream.Finish(), golden.value("decoded", text));
  }
  ASSERT_FALSE(goldens["decodes"].empty());
  for (const json& golden : goldens["decodes"]) {
    EXPECT_EQ(tokenizer.Decode(Ids(golden["ids"]), Tokenizer::Special::kKeep),
              golden["text"].get<std::string>())
        << golden["ids"].dump();
  }
}

TEST(Tokenizer, RealModel_EqualsGoldens) {
  const std::string folder = RealModelFolder();
  KVT_SKIP_WITHOUT_MODEL(folder);
  const auto tokenizer = Tokenizer::Load(folder);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->size(), 49152);
  EXPECT_TRUE((*tokenizer)->prefix_ids().empty());
  EXPECT_EQ((*tokenizer)->FindAdded("<|im_end|>"), 2);
  CheckGoldens(**tokenizer, ReadGoldens("tokenizer_goldens.json"));
}

TEST(Tokenizer, Llama3Style_EqualsGoldens) {
  const auto tokenizer = Tokenizer::Load(std::string(kGoldens) + "small_llama3");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->prefix_ids(), std::vector<int32_t>{0});
  CheckGoldens(**tokenizer, ReadGoldens("small_llama3.json"));
}

TEST(Tokenizer, Gpt2Style_EqualsGoldens) {
  const auto tokenizer = Tokenizer::Load(std::string(kGoldens) + "small_gpt2");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  CheckGoldens(**tokenizer, ReadGoldens("small_gpt2.json"));
}

// NFC, and added tokens that are looked for before and after it.
TEST(Tokenizer, QwenStyle_EqualsGoldens) {
  const auto tokenizer = Tokenizer::Load(std::string(kGoldens) + "small_qwen");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_TRUE((*tokenizer)->prefix_ids().empty());
  CheckGoldens(**tokenizer, ReadGoldens("small_qwen.json"));
}

std::unique_ptr<Tokenizer> Small() {
  auto tokenizer = Tokenizer::Load(std::string(kGoldens) + "small_gpt2");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(Tokenizer, InvalidUtf8_NamesTheByte) {
  const auto tokenizer = Small();
  const std::pair<std::string, std::string> cases[] = {
      {"abc\xff", "byte 0xff at offset 3"},                      // never in UTF-8
      {"\xc3", "byte 0xc3 at offset 0"},                         // cut
      {"ab\xed\xa0\x80", "byte 0xed at offset 2"},               // surrogate
      {"\xc0\xaf", "byte 0xc0 at offset 0"},                     // overlong
      {"0123456789\xf4\x90\x80\x80", "byte 0xf4 at offset 10"},  // beyond U+10FFFF
      {"\x80", "byte 0x80 at offset 0"},
  };
  for (const auto& [text, message] : cases) {
    const auto ids = tokenizer->Encode(text, SpecialTokens::kParse);
    EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(ids.status().message()).find(message), std::string::npos) << ids.status();
  }
}

TEST(Tokenizer, TextTooLong_IsRefused) {
  EXPECT_EQ(
      Small()->Encode(std::string(kEncodeBytesMax + 1, 'a'), SpecialTokens::kParse).status().code(),
      absl::StatusCode::kInvalidArgument);
}

TEST(Tokenizer, IdsWithoutToken_GiveNothing) {
  const auto tokenizer = Small();
  EXPECT_EQ(tokenizer->Decode({-1, 1 << 30, tokenizer->size()}, Tokenizer::Special::kKeep), "");
  EXPECT_FALSE(tokenizer->IsSpecial(-1));
  EXPECT_FALSE(tokenizer->IsSpecial(tokenizer->size()));
}

TEST(Tokenizer, SkipSpecial_DropsThem) {
  const auto tokenizer = Small();
  const auto ids = tokenizer->Encode("<|im_start|>a<tool>b<|im_end|>", SpecialTokens::kParse);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(tokenizer->Decode(*ids, Tokenizer::Special::kSkip), "a<tool>b");
}

TEST(TokenStream, CharacterOverSeveralTokens_ComesWhole) {
  const auto tokenizer = Small();
  const auto ids = tokenizer->Encode("🙂", SpecialTokens::kParse);
  ASSERT_TRUE(ids.ok());
  ASSERT_EQ(ids->size(), 4u);
  TokenStream stream(*tokenizer, Tokenizer::Special::kKeep);
  EXPECT_EQ(stream.Append((*ids)[0]), "");
  EXPECT_EQ(stream.Append((*ids)[1]), "");
  EXPECT_EQ(stream.Append((*ids)[2]), "");
  EXPECT_EQ(stream.Append((*ids)[3]), "🙂");
  EXPECT_EQ(stream.Append((*ids)[0]), "");
  EXPECT_EQ(stream.Finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.Finish(), "");
}

TEST(Tokenizer, ManyThreads_GiveTheSameIds) {
  const auto tokenizer = Small();
  const std::string text(50000, 'x');
  const auto expected = tokenizer->Encode(text + " the end", SpecialTokens::kParse);
  ASSERT_TRUE(expected.ok());
  std::vector<std::thread> threads;
  std::vector<int> equal(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto ids = tokenizer->Encode(text + " the end", SpecialTokens::kParse);
      equal[t] = ids.ok() && *ids == *expected;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(equal, std::vector<int>(4, 1));
}

// A tokenizer.json that works, with one change at a JSON pointer.
absl::Status LoadChanged(const std::string& pointer, const json& value) {
  json top = json::parse(std::ifstream(std::string(kGoldens) + "small_gpt2/tokenizer.json"));
  top[json::json_pointer(pointer)] = value;
  TempFolder folder;
  folder.Write("tokenizer.json", top.dump());
  return Tokenizer::Load(folder.path()).status();
}

TEST(Tokenizer, UnsupportedFile_IsRefusedByName) {
  const json nfkc = {{"type", "NFKC"}};
  const json punctuation = {{"type", "Punctuation"}};
  const std::tuple<std::string, json, std::string> cases[] = {
      {"/normalizer", nfkc, "normalizer is {\"type\":\"NFKC\"}"},
      {"/pre_tokenizer", punctuation, "pre_tokenizer is {\"type\":\"Punctuation\"}"},
      {"/pre_tokenizer", nullptr, "pre_tokenizer is null"},
      {"/pre_tokenizer/add_prefix_space", true, "add_prefix_space is true"},
      {"/decoder", json{{"type", "Metaspace"}}, "decoder is"},
      {"/post_processor", json{{"type", "RobertaProcessing"}}, "post_processor is"},
      {"/model/type", "Unigram", "model.type is \"Unigram\""},
      {"/model/byte_fallback", true, "model.byte_fallback is true"},
      {"/model/dropout", 0.1, "model.dropout is 0.1"},
      {"/model/end_of_word_suffix", "</w>", "model.end_of_word_suffix is \"</w>\""},
      {"/added_tokens/0/lstrip", true, "<|begin|>: lstrip is true"},
  };
  for (const auto& [pointer, value, message] : cases) {
    const absl::Status status = LoadChanged(pointer, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << pointer << ": " << status;
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
    EXPECT_NE(std::string(status.message()).find("tokenizer.json"), std::string::npos) << status;
  }
}

TEST(Tokenizer, MalformedFile_IsRefusedByName) {
  const std::tuple<std::string, json, std::string> cases[] = {
      {"/model/vocab", json::object(), "model.vocab is missing"},
      {"/model/vocab/a", -1, "model.vocab: a has id -1"},
      {"/model/vocab/a", 1 << 30, "model.vocab: a has id 1073741824"},
      {"/model/vocab/a", "x", "model.vocab: a has id \"x\""},
      {"/model/vocab/zzz", 5, "has id 5 twice"},
      {"/model/merges", 3, "model.merges is missing"},
      {"/model/merges/0", "qqqq", "model.merges[0] is \"qqqq\""},
      {"/model/merges/1", json::array({"q"}), "model.merges[1] is [\"q\"]"},
      {"/model/merges/2", "q z", "merges[2]: \"qz\" is not in vocab"},
      {"/added_tokens/1/id", 1.5, "<|im_start|> has id 1.5"},
      {"/added_tokens/1/id", 9, "<|im_start|> has id 9, which another token has"},
      {"/added_tokens/1/content", "", "added_tokens has an entry without content"},
      {"/pre_tokenizer", json{{"type", "Sequence"}}, "Sequence: pretokenizers is no list"},
      {"/post_processor", json{{"type", "TemplateProcessing"}},
       "post_processor: single is missing"},
  };
  for (const auto& [pointer, value, message] : cases) {
    const absl::Status status = LoadChanged(pointer, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << pointer << ": " << status;
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
  }
  const absl::Status pattern =
      LoadChanged("/pre_tokenizer",
                  {{"type", "Sequence"},
                   {"pretokenizers",
                    {{{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "(a"}}}},
                     {{"type", "ByteLevel"}, {"add_prefix_space", false}}}}});
  EXPECT_NE(std::string(pattern.message()).find("pattern (a:"), std::string::npos) << pattern;
  TempFolder folder;
  EXPECT_EQ(Tokenizer::Load(folder.path()).status().code(), absl::StatusCode::kNotFound);
  folder.Write("tokenizer.json", "{\"model\": ");
  EXPECT_EQ(Tokenizer::Load(folder.path()).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kvt
