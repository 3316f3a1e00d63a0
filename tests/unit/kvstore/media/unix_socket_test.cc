#include "kvstore/media/unix_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "kernels/base/clock.h"

namespace kvt {
namespace {

absl::Time In(absl::Duration d) { return RealClock::Get().Now() + d; }

class UnixSocketTest : public testing::Test {
 protected:
  ~UnixSocketTest() override { (void)unlink(path_.c_str()); }
  const std::string path_ =
      (std::filesystem::temp_directory_path() / absl::StrCat("kvt-unix-", getpid(), ".sock"))
          .string();
  std::vector<std::byte> Bytes(size_t n) { return std::vector<std::byte>(n, std::byte{3}); }
};

TEST_F(UnixSocketTest, Descriptor_Passes) {
  auto listener = ListenUnix(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  struct stat info;
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  auto client = ConnectUnix(path_, In(absl::Seconds(10)));
  ASSERT_TRUE(client.ok()) << client.status();
  auto server = AcceptUnix(listener->get());
  ASSERT_TRUE(server.ok()) << server.status();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueFd read_end(ends[0]);
  const UniqueFd write_end(ends[1]);
  const int fds[] = {write_end.get()};
  ASSERT_TRUE(SendFdMessage(server->get(), Bytes(10), fds, In(absl::Seconds(10))).ok());
  auto message = ReceiveFdMessage(client->get(), In(absl::Seconds(10)));
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->bytes, Bytes(10));
  ASSERT_EQ(message->fds.size(), 1u);
  ASSERT_EQ(write(message->fds[0].get(), "k", 1), 1);
  char got = 0;
  ASSERT_EQ(read(read_end.get(), &got, 1), 1);
  EXPECT_EQ(got, 'k');
}

TEST_F(UnixSocketTest, SilentAndGonePeers_EndByDeadlineAndAtOnce) {
  auto listener = ListenUnix(path_);
  ASSERT_TRUE(listener.ok());
  auto client = ConnectUnix(path_, In(absl::Seconds(10)));
  ASSERT_TRUE(client.ok());
  auto server = AcceptUnix(listener->get());
  ASSERT_TRUE(server.ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      ReceiveFdMessage(client->get(), In(absl::Milliseconds(20))).status()));
  // A peer that does not read: the buffer fills, then the deadline passes.
  absl::Status sent;
  for (int i = 0; i < 10'000 && sent.ok(); ++i) {
    sent = SendFdMessage(server->get(), Bytes(kFdMessageBytesMax), {}, In(absl::Milliseconds(20)));
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(sent)) << sent;
  client->Reset();
  EXPECT_TRUE(
      absl::IsUnavailable(SendFdMessage(server->get(), Bytes(1), {}, In(absl::Seconds(10)))));
}

TEST_F(UnixSocketTest, OversizedMessages_AreRefusedOnBothEnds) {
  auto listener = ListenUnix(path_);
  ASSERT_TRUE(listener.ok());
  auto client = ConnectUnix(path_, In(absl::Seconds(10)));
  ASSERT_TRUE(client.ok());
  auto server = AcceptUnix(listener->get());
  ASSERT_TRUE(server.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(
      SendFdMessage(client->get(), Bytes(kFdMessageBytesMax + 1), {}, In(absl::Seconds(1)))));
  EXPECT_TRUE(absl::IsInvalidArgument(SendFdMessage(client->get(), {}, {}, In(absl::Seconds(1)))));
  const std::vector<std::byte> big = Bytes(kFdMessageBytesMax + 1);
  ASSERT_EQ(send(client->get(), big.data(), big.size(), 0), static_cast<ssize_t>(big.size()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(ReceiveFdMessage(server->get(), In(absl::Seconds(10))).status()));
}

TEST_F(UnixSocketTest, Listen_StaleIsReplacedLiveAndFilesAreNot) {
  {
    auto stale = ListenUnix(path_);
    ASSERT_TRUE(stale.ok());
  }
  auto listener = ListenUnix(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  const absl::Status second = ListenUnix(path_).status();
  EXPECT_TRUE(absl::IsUnavailable(second)) << second;
  EXPECT_NE(second.message().find(path_), absl::string_view::npos);
  listener->Reset();
  (void)unlink(path_.c_str());
  std::ofstream(path_) << "a file";
  EXPECT_TRUE(absl::IsUnavailable(ListenUnix(path_).status()));
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(UnixSocketTest, NobodyThere_IsUnavailableWithThePath) {
  const absl::Status status = ConnectUnix(path_, In(absl::Seconds(10))).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find(path_), absl::string_view::npos);
  EXPECT_TRUE(absl::IsUnavailable(ListenUnix("/nonexistent-folder/kvtide.sock").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ListenUnix(std::string(200, 'x')).status()));
}

}  // namespace
}  // namespace kvt
