// Starts that must fail: soon, with cause and remedy, and with nothing left behind.
#include <gtest/gtest.h>

#include <vector>

#include "absl/strings/numbers.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_transport.h"

namespace kvt {
namespace {

// Never asked: the servers here do not start.
class NoResolver final : public PieceResolver {
 public:
  absl::Status Attach(const SessionToken&) override { return absl::InternalError("asked"); }
  void Detach(SessionId) override {}
  void ResolvePull(SessionId, absl::Span<const Piece>, absl::Span<ResolvedPull>) override {}
  void ReleasePull(SessionId, absl::Span<const Piece>) override {}
  void ResolvePush(SessionId, absl::Span<const Piece>, absl::Span<ResolvedPush>) override {}
  void CommitPush(SessionId, absl::Span<const PushedPiece>, absl::Span<PieceStatus>) override {}
};

TEST(UcxTransport, UnknownDeviceOrTransport_IsRefusedWithItsName) {
  UcxOptions options;
  options.tls = "tcp";
  options.net_devices = "nosuchdevice0";
  absl::Status status = MakeUcxTransport(options).status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("nosuchdevice0"), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("there are: "), absl::string_view::npos) << status;
  options.net_devices = "lo";
  options.tls = "nosuchtransport";
  status = MakeUcxTransport(options).status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("nosuchtransport"), absl::string_view::npos) << status;
  options.tls = "tcp";
  options.poll_before_sleep = absl::Seconds(2);
  EXPECT_TRUE(absl::IsInvalidArgument(MakeUcxTransport(options).status()));
}

TEST(UcxServer, PortInUseOrForeignAddress_IsRefusedWithTheAddress) {
  NoResolver resolver;
  std::vector<std::byte> arena(4096);
  UcxServerOptions options;
  options.ucx.tls = "tcp";
  options.ucx.net_devices = "lo";
  auto first = StartUcxServer(options, absl::MakeSpan(arena), resolver);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = (*first)->Address();
  ASSERT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &options.port));
  absl::Status status = StartUcxServer(options, absl::MakeSpan(arena), resolver).status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("127.0.0.1"), absl::string_view::npos) << status;
  options.host = "not an address";
  EXPECT_TRUE(
      absl::IsInvalidArgument(StartUcxServer(options, absl::MakeSpan(arena), resolver).status()));
}

TEST(ShmServer, NoFolder_IsRefusedWithThePath) {
  NoResolver resolver;
  auto arena = SharedMapping::Create("arena", 4096, SharedMappingOptions{});
  auto table = RecordTable::Create(1);
  ASSERT_TRUE(arena.ok() && table.ok());
  ShmServerOptions options;
  options.socket_path = "/nonexistent-folder/store.sock";
  const absl::Status status = StartShmServer(options, *arena, *table, resolver).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find("/nonexistent-folder"), absl::string_view::npos);
  ShmOptions client;
  client.gather_threads = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(client.Validate()));
}

}  // namespace
}  // namespace kvt
