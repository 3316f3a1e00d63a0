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

TEST(CoordinatorOptions, Tenants_HaveTheirOwnFidelityAndTheRestTheDefault) {
  const auto options = Read(
      "[coordinator]\noffload_from_tokens = 100\nfidelity = \"elastic\"\n"
      "[[coordinator.tenants]]\nname = \"a\"\nfidelity = \"sparse\"\n"
      "[[coordinator.tenants]]\nname = \"b\"\nloosest_fidelity = \"elastic\"\n");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->core.offload_from_tokens, 100u);
  EXPECT_EQ(options->core.other_tenants.fidelity, Fidelity::kElastic);
  EXPECT_EQ(options->core.other_tenants.loosest, Fidelity::kSparse);
  ASSERT_EQ(options->core.tenants.size(), 2u);
  EXPECT_EQ(options->core.tenants.at("a").fidelity, Fidelity::kSparse);
  EXPECT_EQ(options->core.tenants.at("b").fidelity, Fidelity::kElastic);
  EXPECT_EQ(options->core.tenants.at("b").loosest, Fidelity::kElastic);
  // As `kvtide up` writes them: one line.
  const auto line = Read("[coordinator]\ntenants = [{name = \"a\", fidelity = \"sparse\"}]\n");
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->core.tenants.at("a").fidelity, Fidelity::kSparse);
}

TEST(CoordinatorOptions, TenantsThatContradict_AreRefusedWithTheirLines) {
  const auto status = Read(
      "[coordinator]\nfidelity = \"best\"\n"
      "[[coordinator.tenants]]\nname = \"a\"\nfidelity = \"sparse\"\nloosest_fidelity = \"exact\"\n"
      "[[coordinator.tenants]]\nname = \"a\"\n").status();
  const std::string message(status.message());
  EXPECT_NE(message.find("c.toml:2"), std::string::npos) << message;
  EXPECT_NE(message.find("looser than loosest_fidelity"), std::string::npos) << message;
  EXPECT_NE(message.find("tenant \"a\" is listed twice"), std::string::npos) << message;
}

TEST(CoordinatorOptions, DeathSoonerThanTwoHeartbeats_IsRefused) {
  EXPECT_FALSE(Read("[coordinator]\nheartbeat_interval = \"1s\"\ndeath_after = \"1s\"\n").ok());
  EXPECT_FALSE(Read("[coordinator]\ndeath_after = \"10s\"\n").ok());
}

}  // namespace
}  // namespace kvt
