#include "kernels/base/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/units.h"

namespace kvt {
namespace {

using ::testing::HasSubstr;

TEST(Options, UnknownKey_NamesFileLineAndKey) {
  auto file = OptionsFile::Parse("[store]\nport = 1\nprot = 2\n", "a.toml");
  ASSERT_TRUE(file.ok());
  int port = 0;
  file->Table("store").Get("port", &port, 0, 65535);
  const absl::Status status = file->Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a.toml:3: store.prot: unknown key"));
  EXPECT_EQ(port, 1);
}

TEST(Options, OutOfRange_NamesRangeAndKeepsDefault) {
  auto file = OptionsFile::Parse("x = 70000\n", "a.toml");
  ASSERT_TRUE(file.ok());
  int x = 5;
  file->Root().Get("x", &x, 0, 65535);
  EXPECT_THAT(std::string(file->Finish().message()), HasSubstr("70000 is outside [0, 65535]"));
  EXPECT_EQ(x, 5);
}

TEST(Options, WrongType_Named) {
  auto file = OptionsFile::Parse("x = \"1\"\n", "a.toml");
  ASSERT_TRUE(file.ok());
  int x = 5;
  file->Root().Get("x", &x, 0, 10);
  EXPECT_THAT(std::string(file->Finish().message()),
              HasSubstr("a.toml:1: x: expected an integer, found a string"));
}

TEST(Options, SyntaxError_NamesLine) {
  auto file = OptionsFile::Parse("x = 1\ny = = 2\n", "a.toml");
  ASSERT_FALSE(file.ok());
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("a.toml:2:"));
}

TEST(Options, MissingFile_NotFound) {
  EXPECT_EQ(OptionsFile::Load("/nonexistent.toml").status().code(), absl::StatusCode::kNotFound);
}

TEST(Options, Bytes_Parses) {
  auto file = OptionsFile::Parse("a = \"2GiB\"\nb = 4096\nc = \"2 GB\"\n", "a.toml");
  ASSERT_TRUE(file.ok());
  uint64_t a = 0, b = 0, c = 7;
  OptionsTable root = file->Root();
  root.GetBytes("a", &a, 0, 4 * kGiB);
  root.GetBytes("b", &b, 0, 4 * kGiB);
  root.GetBytes("c", &c, 0, 4 * kGiB);
  EXPECT_EQ(a, 2 * kGiB);
  EXPECT_EQ(b, 4096u);
  EXPECT_EQ(c, 7u);
  EXPECT_THAT(std::string(file->Finish().message()), HasSubstr("c: expected a byte count"));
}

TEST(Options, Tables_ReadEachElementAndFindUnknownKeys) {
  auto file = OptionsFile::Parse("[[node]]\nname = \"a\"\n[[node]]\nname = \"b\"\nzzz = 1\n", "a.toml");
  ASSERT_TRUE(file.ok());
  std::vector<std::string> names;
  for (OptionsTable& table : file->Root().Tables("node")) {
    std::string name;
    table.Require("name", &name);
    names.push_back(name);
  }
  EXPECT_THAT(names, ::testing::ElementsAre("a", "b"));
  EXPECT_THAT(std::string(file->Finish().message()), HasSubstr("a.toml:5: node[1].zzz: unknown key"));
}

}  // namespace
TEST(OptionsTable_PassedOn, RendersEachValueAndLeavesNoUnknownKey) {
  auto file = OptionsFile::Parse("[t]\na = \"2GiB\"\nb = 3\nc = [1, \"x\"]\nd = {e = true, \"f g\" = 1.5}\n",
                                 "t.toml");
  ASSERT_TRUE(file.ok());
  OptionsTable table = file->Table("t");
  std::string text;
  for (const std::string& key : table.Keys()) text += key + " = " + table.Render(key) + "\n";
  EXPECT_TRUE(file->Finish().ok()) << file->Finish();
  auto again = OptionsFile::Parse(text, "again.toml");
  ASSERT_TRUE(again.ok()) << text;
  OptionsTable root = again->Root();
  uint64_t a = 0;
  root.GetBytes("a", &a, 0, UINT64_MAX);
  int b = 0;
  root.Get("b", &b, 0, 10);
  EXPECT_EQ(root.Render("c"), "[1, 'x']");
  OptionsTable d = root.Table("d");
  bool e = false;
  d.Get("e", &e);
  double fg = 0;
  d.Get("f g", &fg, 0, 10);
  EXPECT_TRUE(again->Finish().ok()) << again->Finish();
  EXPECT_EQ(a, uint64_t{2} << 30);
  EXPECT_EQ(b, 3);
  EXPECT_TRUE(e);
  EXPECT_EQ(fg, 1.5);
  EXPECT_EQ(root.Render("missing"), "");
}

}  // namespace kvt
