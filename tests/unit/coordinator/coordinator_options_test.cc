#include "coordinator/coordinator_options.h"

#include <gtest/gtest.h>

namespace kvt {
namespace {

absl::StatusOr<CoordinatorOptions> Read(const std::string& text) {
  auto file = OptionsFile::Parse(text, "c.toml");
  if (!file.ok()) return file.status();
  return ReadCoordinatorOptions(*file);
}

TEST(CoordinatorOptions, EmptyFile_ListensOnLoopback) {
  const auto options = Read("");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->listen, "127.0.0.1:7070");
  EXPECT_LT(options->core.death_after + options->core.heartbeat_interval, absl::Seconds(3));
}

TEST(CoordinatorOptions, UnknownKeyAndBadValues_AreRefusedWithTheirLines) {
  const auto status =
      Read("[coordinator]\nheartbeat = \"1s\"\nrequest_limit = 0\n[node]\nlog_level = \"loud\"\n")
          .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  const std::string message(status.message());
  EXPECT_NE(message.find("c.toml:2: coordinator.heartbeat: unknown key"), std::string::npos);
  EXPECT_NE(message.find("c.toml:3"), std::string::npos);
  EXPECT_NE(message.find("c.toml:5"), std::string::npos);
}

TEST(CoordinatorOptions, DeathSoonerThanTwoHeartbeats_IsRefused) {
  EXPECT_FALSE(Read("[coordinator]\nheartbeat_interval = \"1s\"\ndeath_after = \"1s\"\n").ok());
  EXPECT_FALSE(Read("[coordinator]\ndeath_after = \"10s\"\n").ok());
}

}  // namespace
}  // namespace kvt
