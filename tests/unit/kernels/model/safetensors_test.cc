#include "kernels/model/safetensors.h"

#include <gtest/gtest.h>

#include "kernels/base/random.h"
#include "nlohmann/json.hpp"
#include "tests/support/model_folder.h"
#include "tests/support/safetensors_writer.h"

namespace kvt {
namespace {

using nlohmann::json;

std::vector<TestTensor> TwoTensors() {
  return {{"a", "F32", {2, 3}, std::string(24, 'a')}, {"b", "BF16", {5}, std::string(10, 'b')}};
}

absl::Status OpenText(const std::string& file) {
  TempFolder folder;
  folder.Write("model.safetensors", file);
  return Safetensors::Open(folder.path()).status();
}

TEST(Safetensors, OneFile_GivesItsTensors) {
  TempFolder folder;
  folder.Write("model.safetensors", SafetensorsFile(TwoTensors()));
  const auto files = Safetensors::Open(folder.path());
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ((*files)->Names(), (std::vector<std::string>{"a", "b"}));
  const auto a = (*files)->Find("a", {2, 3});
  ASSERT_TRUE(a.ok()) << a.status();
  EXPECT_EQ(a->type, TensorType::kF32);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(a->bytes.data()), a->bytes.size()),
            std::string(24, 'a'));
  const auto b = (*files)->Find("b", {5});
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(b->type, TensorType::kBf16);
  EXPECT_EQ(static_cast<char>(b->bytes[9]), 'b');
}

TEST(Safetensors, Find_NamesFileAndTensor) {
  TempFolder folder;
  folder.Write("model.safetensors", SafetensorsFile({{"a", "F32", {2}, std::string(8, 0)},
                                                     {"i", "I64", {1}, std::string(8, 0)}}));
  const auto files = Safetensors::Open(folder.path());
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ((*files)->Find("c", {2}).status().code(), absl::StatusCode::kNotFound);
  const absl::Status shape = (*files)->Find("a", {2, 1}).status();
  EXPECT_NE(std::string(shape.message())
                .find("model.safetensors: tensor a: shape [2], where config.json asks for [2, 1]"),
            std::string::npos)
      << shape;
  const absl::Status type = (*files)->Find("i", {1}).status();
  EXPECT_NE(std::string(type.message()).find("tensor i: dtype I64"), std::string::npos) << type;
  EXPECT_NE((*files)->FindAny("i"), nullptr);
}

void WriteShards(const TempFolder& folder, const json& weight_map) {
  folder.Write("model-1.safetensors", SafetensorsFile({TwoTensors()[0]}));
  folder.Write("model-2.safetensors", SafetensorsFile({TwoTensors()[1]}));
  folder.Write("model.safetensors.index.json", json{{"weight_map", weight_map}}.dump());
}

TEST(Safetensors, Shards_AreOneFolder) {
  TempFolder folder;
  WriteShards(folder, {{"a", "model-1.safetensors"}, {"b", "model-2.safetensors"}});
  const auto files = Safetensors::Open(folder.path());
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_TRUE((*files)->Find("a", {2, 3}).ok());
  EXPECT_TRUE((*files)->Find("b", {5}).ok());
}

TEST(Safetensors, BadIndex_IsRefusedByName) {
  const std::pair<json, std::string> cases[] = {
      {json::object(), "weight_map is missing, empty"},
      {"x", "no object"},
      {{{"a", "../model-1.safetensors"}},
       "tensor a: \"../model-1.safetensors\" is not a file name"},
      {{{"a", "/etc/passwd"}}, "is not a file name"},
      {{{"a", 3}}, "tensor a: 3 is not a file name"},
      {{{"a", "model-9.safetensors"}}, "model-9.safetensors: No such file"},
      {{{"a", "model-2.safetensors"}, {"b", "model-1.safetensors"}}, "tensor a: is not in"},
      {{{"z", "model-1.safetensors"}}, "tensor z: is not in"},
  };
  for (const auto& [map, message] : cases) {
    TempFolder folder;
    WriteShards(folder, map);
    const absl::Status status = Safetensors::Open(folder.path()).status();
    EXPECT_FALSE(status.ok()) << map.dump();
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
  }
  TempFolder twice;
  WriteShards(twice, {{"a", "model-1.safetensors"}, {"b", "model-2.safetensors"}});
  twice.Write("model-2.safetensors", SafetensorsFile(TwoTensors()));
  EXPECT_NE(
      std::string(Safetensors::Open(twice.path()).status().message()).find("tensor a: stands in"),
      std::string::npos);
}

TEST(Safetensors, NoFile_IsNotFound) {
  TempFolder folder;
  EXPECT_EQ(Safetensors::Open(folder.path()).status().code(), absl::StatusCode::kNotFound);
}

TEST(Safetensors, MalformedHeader_IsRefusedByName) {
  const auto entry = [](const std::string& fields) { return "{\"t\":{" + fields + "}}"; };
  const std::string data(8, 'x');
  const std::pair<std::string, std::string> cases[] = {
      {"", "is too short"},
      {std::string(7, '\0'), "is too short"},
      {std::string(8, '\xff'), "header length 18446744073709551615 does not fit"},
      {std::string("\x05\0\0\0\0\0\0\0{}", 10), "header length 5 does not fit a file of 10 bytes"},
      {SafetensorsFile("", ""), "not JSON"},
      {SafetensorsFile("{", data), "not JSON"},
      {SafetensorsFile("[]", ""), "header is not an object"},
      {SafetensorsFile("{\"t\":3}", ""), "tensor t: its header entry is not an object"},
      {SafetensorsFile("{}", data), "8 bytes after the last tensor"},
      {SafetensorsFile(entry(R"("shape":[2],"data_offsets":[0,8])"), data),
       "tensor t: dtype is missing"},
      {SafetensorsFile(entry(R"("dtype":"F32","data_offsets":[0,8])"), data),
       "tensor t: shape is missing"},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[2])"), data),
       "tensor t: data_offsets is missing"},
      {SafetensorsFile(entry(R"("dtype":"F3","shape":[2],"data_offsets":[0,8])"), data),
       "tensor t: dtype \"F3\""},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), data),
       "tensor t: shape [-2]"},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), data),
       "tensor t: shape [2.0]"},
      {SafetensorsFile(
           entry(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8])"), data),
       "overflows"},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8])"),
                       data),
       "too many dimensions"},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), data),
       "need 12"},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[3],"data_offsets":[0,12])"), data),
       "not within"},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), data),
       "not within"},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])"), data),
       "not two numbers"},
      {SafetensorsFile(entry(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"), data),
       "not within"},
      {SafetensorsFile(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                       R"("t":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                       data),
       "field t stands twice"},
      {SafetensorsFile(R"({"t":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                       R"("u":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                       data),
       "tensor u: begins at 4, where 8 is expected"},
      {SafetensorsFile(R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                       R"("u":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                       data),
       "tensor u: begins at 4, where 2 is expected"},
  };
  for (const auto& [file, message] : cases) {
    const absl::Status status = OpenText(file);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_NE(std::string(status.message()).find("model.safetensors: "), std::string::npos)
        << status;
    EXPECT_NE(std::string(status.message()).find(message), std::string::npos) << status;
  }
}

TEST(Safetensors, EmptyTensors_AreFine) {
  EXPECT_TRUE(OpenText(SafetensorsFile({{"e", "F32", {0, 7}, ""}, {"s", "F32", {}, "1234"}})).ok());
}

// Every cut of a good file, and random changes of its bytes: an error, or tensors that can be read
// to the last byte.
TEST(Safetensors, DamagedFile_NeverReadsOutside) {
  const std::string good = SafetensorsFile(TwoTensors());
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(OpenText(good.substr(0, size)).ok()) << size;
  }
  const uint64_t seed = 7;
  SCOPED_TRACE(seed);
  Random random(seed);
  const size_t header_end = good.size() - 34;
  TempFolder folder;
  int opened = 0;
  for (int round = 0; round < 4000; ++round) {
    std::string bad = good;
    for (int change = random.Below(3); change >= 0; --change) {
      constexpr char kPool[] = "0123456789[]{},:\"-eF \\";
      bad[random.Below(header_end)] = round % 2 == 0 ? kPool[random.Below((sizeof(kPool) - 1))]
                                                     : static_cast<char>(random.Next());
    }
    folder.Write("model.safetensors", bad);
    const auto files = Safetensors::Open(folder.path());
    if (!files.ok()) {
      EXPECT_NE(std::string(files.status().message()).find("model.safetensors"), std::string::npos);
      continue;
    }
    ++opened;
    size_t sum = 0;
    for (const std::string& name : (*files)->Names()) {
      for (const std::byte byte : (*files)->FindAny(name)->bytes) sum += static_cast<size_t>(byte);
    }
    EXPECT_EQ(sum, 24u * 'a' + 10u * 'b');  // the data was not changed, and is covered exactly
  }
  EXPECT_GT(opened, 0);  // renamed tensors, for instance
}

}  // namespace
}  // namespace kvt
