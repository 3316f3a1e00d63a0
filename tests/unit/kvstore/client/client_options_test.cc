#include "kvstore/client/client_options.h"

#include <sys/stat.h>

#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace kvt {
namespace {

absl::StatusOr<ClientOptions> Read(const std::string& text) {
  auto file = OptionsFile::Parse(text, "test.toml");
  if (!file.ok()) return file.status();
  ClientOptions options = ReadClientOptions(file->Table("tier"));
  const absl::Status status = file->Finish();
  if (!status.ok()) return status;
  return options;
}

std::string SecretFile(const std::string& text, mode_t mode) {
  std::string path = ::testing::TempDir() + "/secret-XXXXXX";
  const int fd = mkstemp(path.data());
  EXPECT_GE(fd, 0);
  EXPECT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  EXPECT_EQ(fchmod(fd, mode), 0);
  close(fd);
  return path;
}

TEST(ClientOptions, Empty_KeepsDefaults) {
  const auto options = Read("");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->transport, TierTransport::kAuto);
  EXPECT_TRUE(options->verify_checksums);
}

TEST(ClientOptions, EveryKey_IsRead) {
  const auto options = Read(R"([tier]
transport = "ucx"
verify_checksums = false
ucx_net_devices = "lo"
ucx_tls = "tcp"
shm_gather_threads = 2
control_timeout = "3s"
lookup_timeout = "300ms"
transfer_timeout = "7s"
connect_timeout = "4s"
breaker_failures = 5
breaker_pause = "100ms"
breaker_pause_max = "9s"
control_threads = 8
cluster_secret_file = "/etc/kvtide/secret"
)");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->transport, TierTransport::kUcx);
  EXPECT_FALSE(options->verify_checksums);
  EXPECT_EQ(options->ucx_net_devices, "lo");
  EXPECT_EQ(options->ucx_tls, "tcp");
  EXPECT_EQ(options->shm_gather_threads, 2);
  EXPECT_EQ(options->control_timeout, absl::Seconds(3));
  EXPECT_EQ(options->lookup_timeout, absl::Milliseconds(300));
  EXPECT_EQ(options->transfer_timeout, absl::Seconds(7));
  EXPECT_EQ(options->connect_timeout, absl::Seconds(4));
  EXPECT_EQ(options->breaker_failures, 5);
  EXPECT_EQ(options->breaker_pause, absl::Milliseconds(100));
  EXPECT_EQ(options->breaker_pause_max, absl::Seconds(9));
  EXPECT_EQ(options->control_threads, 8);
  EXPECT_EQ(options->cluster_secret_file, "/etc/kvtide/secret");
}

TEST(ClientOptions, BadValues_AreNamedWithLine) {
  const auto options = Read("[tier]\ntransport = \"tcp\"\nbreaker_pause = \"10s\"\nspeed = 3\n");
  ASSERT_FALSE(options.ok());
  const std::string message(options.status().message());
  EXPECT_TRUE(absl::StrContains(message, "auto, ucx, shm")) << message;
  EXPECT_TRUE(absl::StrContains(message, "breaker_pause_max")) << message;
  EXPECT_TRUE(absl::StrContains(message, "speed")) << message;
  EXPECT_TRUE(absl::StrContains(message, "test.toml:2")) << message;
}

TEST(ClusterSecret, PrivateFile_IsReadWithoutTrailingSpace) {
  const auto secret = ReadClusterSecret(SecretFile("0123456789abcdef0123\n", 0600));
  ASSERT_TRUE(secret.ok()) << secret.status();
  EXPECT_EQ(*secret, "0123456789abcdef0123");
}

TEST(ClusterSecret, FileThatOthersRead_IsRefused) {
  EXPECT_TRUE(absl::IsPermissionDenied(
      ReadClusterSecret(SecretFile("0123456789abcdef0123", 0644)).status()));
}

TEST(ClusterSecret, MissingShortAndLong_AreRefused) {
  EXPECT_TRUE(absl::IsNotFound(ReadClusterSecret("/nowhere/secret").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadClusterSecret(SecretFile("short\n", 0600)).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      ReadClusterSecret(SecretFile(std::string(2000, 'x'), 0600)).status()));
}

}  // namespace
}  // namespace kvt
