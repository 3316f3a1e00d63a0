// A coordinator's port under malformed messages (F16): each ends with a typed refusal or an ordinary
// answer, and the service goes on. Bodies are random bytes, and valid messages with random edits.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "coordinator/coordinator_service.h"
#include "kernels/base/clock.h"
#include "kernels/base/random.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

constexpr const char* kMethods[] = {"Register", "Heartbeat", "Leave",  "Admit",
                                    "Place",    "Regrant",   "Cancel", "Update",
                                    "View",     "Status",    "Requests", "Models"};

class RpcFuzz : public ::testing::Test {
 protected:
  RpcFuzz()
      : service_(CoordinatorCoreOptions{}, RealClock::Get(), absl::FromUnixSeconds(1'900'000'000),
                 TicketSigner::Generate()) {}
  void SetUp() override {
    auto server = ServeCoordinator(service_, "127.0.0.1:0");
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    address_ = absl::StrCat("127.0.0.1:", server_->port());
    channel_ = grpc::CreateChannel(address_, grpc::InsecureChannelCredentials());
    stub_ = std::make_unique<grpc::GenericStub>(channel_);
  }

  // The status of a call with this body.
  grpc::Status Call(const std::string& method, const std::string& body) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    grpc::CompletionQueue queue;
    grpc::Slice slice(body);
    grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer reply;
    grpc::Status status;
    auto call = stub_->PrepareUnaryCall(&context, "/kvtide.CoordinatorRpc/" + method, request, &queue);
    call->StartCall();
    call->Finish(&reply, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return status;
  }
  bool Alive() { return ConnectCoordinator(address_, absl::Seconds(5))->Status().ok(); }

  CoordinatorService service_;
  std::unique_ptr<RpcServer> server_;
  std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::GenericStub> stub_;
};

TEST_F(RpcFuzz, RandomBodies_EndTypedAndTheServiceGoesOn) {
  const uint64_t seed = 16;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  Random random(seed);
  int refused = 0;
  for (int i = 0; i < 1500; ++i) {
    std::string body(random.Below(200), '\0');
    for (char& c : body) c = static_cast<char>(random.Next());
    const grpc::Status status = Call(kMethods[random.Below(12)], body);
    refused += status.ok() ? 0 : 1;
    ASSERT_NE(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
    ASSERT_NE(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  EXPECT_GT(refused, 500);
  EXPECT_TRUE(Alive());
  EXPECT_TRUE(service_.Status()->nodes.empty());
}

TEST_F(RpcFuzz, EditedRegistration_NeverLeavesANodeThatIsNotValid) {
  // Field numbers of kvtide.RegisterRequest: kind 1, name 2, epoch 3, versions 4, address 5.
  const std::string valid("\x08\x00\x12\x07store-0\x18\x05\x22\x04\x08\x01\x10\x01\x2a\x03" "a:1", 24);
  ASSERT_TRUE(Call("Register", valid).ok());
  const uint64_t seed = 15;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  Random random(seed);
  for (int i = 0; i < 1500; ++i) {
    std::string body = valid;
    for (uint64_t e = 0; e <= random.Below(3); ++e) {
      body[random.Below(body.size())] = static_cast<char>(random.Next());
    }
    const grpc::Status status = Call("Register", body);
    ASSERT_NE(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  }
  EXPECT_TRUE(Alive());
  const auto after = service_.Status();
  ASSERT_TRUE(after.ok());
  for (const NodeStatus& node : after->nodes) {
    EXPECT_FALSE(node.name.empty());
    for (const char c : node.name) EXPECT_TRUE(std::isgraph(static_cast<unsigned char>(c)));
    EXPECT_FALSE(node.control_address.empty());
    EXPECT_NE(node.epoch, BootEpoch());
  }
}

TEST_F(RpcFuzz, ForgedAndEmptyTickets_AreUnauthenticated) {
  for (const char* method : {"Place", "Regrant"}) {
    EXPECT_EQ(Call(method, "").error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
    // ticket { payload "x", signature 64 zero bytes }
    std::string ticket = std::string("\x0a\x01x\x12\x40", 5) + std::string(64, '\0');
    const std::string body = std::string("\x0a", 1) + static_cast<char>(ticket.size()) + ticket;
    EXPECT_EQ(Call(method, body).error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
  }
  EXPECT_TRUE(Alive());
}

TEST_F(RpcFuzz, UnknownMethod_IsUnimplemented) {
  EXPECT_EQ(Call("Exec", "rm").error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(RpcFuzz, RawGarbageOnThePort_DoesNotStopTheService) {
  const uint64_t seed = 14;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  Random random(seed);
  for (int i = 0; i < 50; ++i) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(server_->port()));
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    std::string bytes(random.Below(4096), '\0');
    for (char& c : bytes) c = static_cast<char>(random.Next());
    if (random.Below(2) == 0) bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes;
    (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    close(fd);
  }
  EXPECT_TRUE(Alive());
}

}  // namespace
}  // namespace kvt
