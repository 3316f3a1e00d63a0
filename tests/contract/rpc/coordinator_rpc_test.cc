// CoordinatorApi through gRPC on a free port: what goes in comes out, errors keep code and text, a
// peer that is gone or stops is a typed failure that names it.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/limits.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/contract/rpc/recording_apis.h"

namespace kvt {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);

ModelInfo FullModel() {
  ModelInfo model;
  model.name = "smol";
  model.fingerprint = "abc";
  model.numerics_id = "cpu/x";
  model.geometry = Geometry{.layers = 30, .kv_heads = 3, .head_dim = 64};
  model.context_tokens_max = 8192;
  return model;
}

LoadReport FullLoad() {
  return LoadReport{.running = 1,
                    .waiting = 2,
                    .slots_free = 3,
                    .slots_total = 4,
                    .tokens_done = UINT64_MAX,
                    .tickets = {{TicketId(5), TicketEpoch(6)}, {TicketId(7), TicketEpoch(8)}},
                    .condition = "its disk is full \xff"};
}

SignedTicket FullTicket(char c) {
  return SignedTicket{.payload = std::string("\0\xff pay", 6) + c, .signature = std::string(64, c)};
}

void ExpectSame(const ModelInfo& a, const ModelInfo& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.fingerprint, b.fingerprint);
  EXPECT_EQ(a.numerics_id, b.numerics_id);
  EXPECT_EQ(a.geometry, b.geometry);
  EXPECT_EQ(a.context_tokens_max, b.context_tokens_max);
}

void ExpectSame(const LoadReport& a, const LoadReport& b) {
  EXPECT_EQ(a.running, b.running);
  EXPECT_EQ(a.waiting, b.waiting);
  EXPECT_EQ(a.slots_free, b.slots_free);
  EXPECT_EQ(a.slots_total, b.slots_total);
  EXPECT_EQ(a.tokens_done, b.tokens_done);
  EXPECT_EQ(a.tickets, b.tickets);
  EXPECT_EQ(a.condition, b.condition);
}

void ExpectSame(const SignedTicket& a, const SignedTicket& b) {
  EXPECT_EQ(a.payload, b.payload);
  EXPECT_EQ(a.signature, b.signature);
}

void ExpectSame(const TokenCounts& a, const TokenCounts& b) {
  EXPECT_EQ(a.exact, b.exact);
  EXPECT_EQ(a.base, b.base);
  EXPECT_EQ(a.sparse, b.sparse);
}

class CoordinatorRpc : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ServeCoordinator(api_, "127.0.0.1:0");
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    address_ = absl::StrCat("127.0.0.1:", server_->port());
    stub_ = ConnectCoordinator(address_, kTimeout);
  }
  RecordingCoordinator api_;
  std::unique_ptr<RpcServer> server_;
  std::string address_;
  std::unique_ptr<CoordinatorApi> stub_;
};

TEST_F(CoordinatorRpc, Register_CarriesEveryField) {
  RegisterRequest request{.kind = NodeKind::kDecode,
                          .name = "decode-0",
                          .epoch = BootEpoch(UINT64_MAX),
                          .versions = {3, 4},
                          .control_address = "10.0.0.1:7",
                          .pid = 4242,
                          .model = FullModel(),
                          .capacity_bytes = uint64_t{1} << 40,
                          .batch_max = 64,
                          .starting = true};
  api_.register_reply = RegisterReply{.heartbeat_interval = absl::Milliseconds(500),
                                      .lease = absl::Seconds(10),
                                      .ticket_public_key = std::string("\0\x01\xff", 3),
                                      .coordinator_epoch = "ce"};
  const auto reply = stub_->Register(request);
  ASSERT_TRUE(reply.ok()) << reply.status();
  const RegisterRequest& got = api_.register_request;
  EXPECT_EQ(got.kind, request.kind);
  EXPECT_EQ(got.name, request.name);
  EXPECT_EQ(got.epoch, request.epoch);
  EXPECT_EQ(got.versions, request.versions);
  EXPECT_EQ(got.control_address, request.control_address);
  EXPECT_EQ(got.pid, request.pid);
  ExpectSame(got.model, request.model);
  EXPECT_EQ(got.capacity_bytes, request.capacity_bytes);
  EXPECT_EQ(got.batch_max, request.batch_max);
  EXPECT_EQ(got.starting, request.starting);
  EXPECT_EQ(reply->heartbeat_interval, api_.register_reply.heartbeat_interval);
  EXPECT_EQ(reply->lease, api_.register_reply.lease);
  EXPECT_EQ(reply->ticket_public_key, api_.register_reply.ticket_public_key);
  EXPECT_EQ(reply->coordinator_epoch, api_.register_reply.coordinator_epoch);
}

TEST_F(CoordinatorRpc, Heartbeat_CarriesEveryField) {
  const HeartbeatRequest request{
      .name = "n", .epoch = BootEpoch(2), .view_version = 9, .load = FullLoad()};
  api_.heartbeat_reply.view =
      ClusterView{.version = 10, .stores = {{"store-0", BootEpoch(1), "a:1", 2}}};
  api_.heartbeat_reply.unknown = true;
  api_.heartbeat_reply.drain = true;
  api_.heartbeat_reply.cancelled = {TicketId(1), TicketId(UINT64_MAX)};
  const auto reply = stub_->Heartbeat(request);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(api_.heartbeat_request.name, request.name);
  EXPECT_EQ(api_.heartbeat_request.epoch, request.epoch);
  EXPECT_EQ(api_.heartbeat_request.view_version, request.view_version);
  ExpectSame(api_.heartbeat_request.load, request.load);
  EXPECT_EQ(reply->view.version, 10u);
  EXPECT_EQ(reply->view.stores, api_.heartbeat_reply.view.stores);
  EXPECT_TRUE(reply->unknown);
  EXPECT_TRUE(reply->drain);
  EXPECT_EQ(reply->cancelled, api_.heartbeat_reply.cancelled);
}

TEST_F(CoordinatorRpc, GrantCalls_CarryEveryField) {
  const AdmitRequest admit{.model = "m", .tenant = "t", .prompt_tokens = 1,
                           .output_tokens_max = 2, .fidelity = Fidelity::kSparse,
                           .holder = "client-0"};
  api_.admit_reply = AdmitReply{FullTicket('a'), TicketId(77), "p:1"};
  const auto admitted = stub_->Admit(admit);
  ASSERT_TRUE(admitted.ok()) << admitted.status();
  EXPECT_EQ(api_.admit_request.model, "m");
  EXPECT_EQ(api_.admit_request.tenant, "t");
  EXPECT_EQ(api_.admit_request.prompt_tokens, 1u);
  EXPECT_EQ(api_.admit_request.output_tokens_max, 2u);
  EXPECT_EQ(api_.admit_request.fidelity, Fidelity::kSparse);
  EXPECT_EQ(api_.admit_request.holder, "client-0");
  ExpectSame(admitted->ticket, FullTicket('a'));
  AdmitRequest unnamed = admit;
  unnamed.fidelity.reset();
  ASSERT_TRUE(stub_->Admit(unnamed).ok());
  EXPECT_EQ(api_.admit_request.fidelity, std::nullopt);
  AdmitRequest exact = admit;
  exact.fidelity = Fidelity::kExact;  // the enum's zero is a fidelity, too
  ASSERT_TRUE(stub_->Admit(exact).ok());
  EXPECT_EQ(api_.admit_request.fidelity, Fidelity::kExact);
  EXPECT_EQ(admitted->id, TicketId(77));
  EXPECT_EQ(admitted->prefill_address, "p:1");

  api_.place_reply = PlaceReply{FullTicket('b'), "d:1"};
  const auto placed = stub_->Place(PlaceRequest{FullTicket('c'), {"decode-0", "decode-1"}});
  ASSERT_TRUE(placed.ok()) << placed.status();
  ExpectSame(api_.place_request.ticket, FullTicket('c'));
  EXPECT_EQ(api_.place_request.refused_by, (std::vector<NodeName>{"decode-0", "decode-1"}));
  ExpectSame(placed->ticket, FullTicket('b'));
  EXPECT_EQ(placed->decode_address, "d:1");

  api_.regrant_reply = RegrantReply{FullTicket('d'), "p:2"};
  const auto regranted = stub_->Regrant(RegrantRequest{FullTicket('e'), "why \xff"});
  ASSERT_TRUE(regranted.ok()) << regranted.status();
  ExpectSame(api_.regrant_request.ticket, FullTicket('e'));
  EXPECT_EQ(api_.regrant_request.reason, "why \xff");
  ExpectSame(regranted->ticket, FullTicket('d'));
  EXPECT_EQ(regranted->prefill_address, "p:2");
}

TEST_F(CoordinatorRpc, OneWayCalls_CarryEveryField) {
  EXPECT_TRUE(stub_->Leave("store-1", BootEpoch(3)).ok());
  EXPECT_EQ(api_.leave_name, "store-1");
  EXPECT_EQ(api_.leave_epoch, BootEpoch(3));
  EXPECT_TRUE(stub_->Cancel(TicketId(9), std::string("\0\xfe", 2)).ok());
  EXPECT_EQ(api_.cancel_id, TicketId(9));
  EXPECT_EQ(api_.cancel_capability, std::string("\0\xfe", 2));
  TicketUpdate update{.id = TicketId(1), .epoch = TicketEpoch(2), .node = "n",
                      .phase = RequestPhase::kCancelled, .error = "e",
                      .computed = {.exact = 1, .base = 2, .sparse = 3}, .output_tokens = 4};
  EXPECT_TRUE(stub_->Update({update, TicketUpdate{}}).ok());
  ASSERT_EQ(api_.update_request.size(), 2u);
  const TicketUpdate& got = api_.update_request[0];
  EXPECT_EQ(got.id, update.id);
  EXPECT_EQ(got.epoch, update.epoch);
  EXPECT_EQ(got.node, update.node);
  EXPECT_EQ(got.phase, update.phase);
  EXPECT_EQ(got.error, update.error);
  ExpectSame(got.computed, update.computed);
  EXPECT_EQ(got.output_tokens, update.output_tokens);
}

TEST_F(CoordinatorRpc, StatusCalls_CarryEveryField) {
  ClusterStatus& status = api_.status;
  status.coordinator_epoch = "ce";
  status.uptime = absl::Nanoseconds(123456789);
  status.view_version = 5;
  status.nodes.push_back(NodeStatus{.kind = NodeKind::kPrefill, .name = "p", .epoch = BootEpoch(1),
                                    .control_address = "a:1", .pid = 2, .state = "draining",
                                    .since_heartbeat = absl::Seconds(3), .model = FullModel(),
                                    .capacity_bytes = 4, .load = FullLoad()});
  status.admitted = 1;
  status.running = 2;
  status.done = 3;
  status.failed = 4;
  status.cancelled = 5;
  status.refused = 6;
  status.events = {{.unix_ms = -1, .text = "text \xff"}};
  const auto got = stub_->Status();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->coordinator_epoch, "ce");
  EXPECT_EQ(got->uptime, status.uptime);
  EXPECT_EQ(got->view_version, 5u);
  ASSERT_EQ(got->nodes.size(), 1u);
  const NodeStatus& node = got->nodes[0];
  EXPECT_EQ(node.kind, NodeKind::kPrefill);
  EXPECT_EQ(node.name, "p");
  EXPECT_EQ(node.epoch, BootEpoch(1));
  EXPECT_EQ(node.control_address, "a:1");
  EXPECT_EQ(node.pid, 2);
  EXPECT_EQ(node.state, "draining");
  EXPECT_EQ(node.since_heartbeat, absl::Seconds(3));
  ExpectSame(node.model, FullModel());
  EXPECT_EQ(node.capacity_bytes, 4u);
  ExpectSame(node.load, FullLoad());
  EXPECT_EQ(std::vector<uint64_t>({got->admitted, got->running, got->done, got->failed,
                                   got->cancelled, got->refused}),
            std::vector<uint64_t>({1, 2, 3, 4, 5, 6}));
  ASSERT_EQ(got->events.size(), 1u);
  EXPECT_EQ(got->events[0].unix_ms, -1);
  EXPECT_EQ(got->events[0].text, "text \xff");

  api_.requests = {RequestStatus{
      .id = TicketId(1), .epoch = TicketEpoch(2), .tenant = "t", .model = "m",
      .phase = RequestPhase::kDecode, .prefill_worker = "p", .decode_worker = "d",
      .prompt_tokens = 3, .output_tokens = 4, .fidelity = Fidelity::kElastic,
      .request_class = RequestClass::kOffloaded, .computed = {.exact = 5, .base = 6, .sparse = 7},
      .age = absl::Milliseconds(8), .error = "e"}};
  const auto requests = stub_->Requests();
  ASSERT_TRUE(requests.ok() && requests->size() == 1) << requests.status();
  const RequestStatus& request = (*requests)[0];
  EXPECT_EQ(request.id, TicketId(1));
  EXPECT_EQ(request.epoch, TicketEpoch(2));
  EXPECT_EQ(request.tenant, "t");
  EXPECT_EQ(request.model, "m");
  EXPECT_EQ(request.phase, RequestPhase::kDecode);
  EXPECT_EQ(request.prefill_worker, "p");
  EXPECT_EQ(request.decode_worker, "d");
  EXPECT_EQ(request.prompt_tokens, 3u);
  EXPECT_EQ(request.output_tokens, 4u);
  EXPECT_EQ(request.fidelity, Fidelity::kElastic);
  EXPECT_EQ(request.request_class, RequestClass::kOffloaded);
  ExpectSame(request.computed, api_.requests[0].computed);
  EXPECT_EQ(request.age, absl::Milliseconds(8));
  EXPECT_EQ(request.error, "e");

  api_.models = {FullModel()};
  const auto models = stub_->Models();
  ASSERT_TRUE(models.ok() && models->size() == 1) << models.status();
  ExpectSame((*models)[0], FullModel());
  api_.view = ClusterView{.version = 3, .stores = {{"s", BootEpoch(1), "a:1", 1}}};
  const auto view = stub_->View();
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->version, 3u);
  EXPECT_EQ(view->stores, api_.view.stores);
}

TEST_F(CoordinatorRpc, EveryErrorCode_ArrivesWithItsMessage) {
  for (int code = 1; code <= 16; ++code) {
    api_.failure = absl::Status(static_cast<absl::StatusCode>(code), absl::StrCat("why ", code));
    EXPECT_EQ(stub_->Admit({}).status(), api_.failure);
    EXPECT_EQ(stub_->Leave("n", BootEpoch(1)), api_.failure);
    EXPECT_EQ(stub_->Requests().status(), api_.failure);
  }
}

TEST_F(CoordinatorRpc, LongErrorMessage_ArrivesCut) {
  api_.failure = absl::InternalError(std::string(100'000, 'x'));
  const absl::Status status = stub_->Update({});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_GT(status.message().size(), 1000u);
  EXPECT_LT(status.message().size(), 4096u);
}

TEST_F(CoordinatorRpc, UnknownEnumValue_IsInvalidArgumentNamingTheField) {
  RegisterRequest request;
  request.kind = static_cast<NodeKind>(9);
  EXPECT_EQ(stub_->Register(request).status(),
            absl::InvalidArgumentError("register.kind: unknown value 9"));
  AdmitRequest admit;
  admit.fidelity = static_cast<Fidelity>(200);
  EXPECT_EQ(stub_->Admit(admit).status().code(), absl::StatusCode::kInvalidArgument);
  TicketUpdate update;
  update.phase = static_cast<RequestPhase>(100);
  EXPECT_EQ(stub_->Update({update}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(api_.update_request.empty());
}

TEST_F(CoordinatorRpc, MessageBeyondTheLimit_IsResourceExhaustedAndTheServerGoesOn) {
  PlaceRequest request;
  request.ticket.payload = std::string(size_t{kControlMessageBytesMax} + 1000, 'x');
  EXPECT_EQ(stub_->Place(request).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(stub_->View().ok());
}

TEST_F(CoordinatorRpc, DeadPeer_IsUnavailableNamingIt) {
  server_.reset();
  const absl::Time began = absl::Now();
  const absl::Status status = stub_->View().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_NE(status.message().find(absl::StrCat("coordinator at ", address_)),
            absl::string_view::npos)
      << status;
  EXPECT_LT(absl::Now() - began, absl::Seconds(5));
}

TEST_F(CoordinatorRpc, PeerThatComesBackOnItsPort_IsFoundAgain) {
  ASSERT_TRUE(stub_->View().ok());
  server_.reset();
  EXPECT_FALSE(stub_->View().ok());
  auto server = ServeCoordinator(api_, address_);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  bool found = false;
  while (!found && absl::Now() < deadline) found = stub_->View().ok();
  EXPECT_TRUE(found);
}

TEST_F(CoordinatorRpc, PortThatIsTaken_IsUnavailableNamingTheAddress) {
  const auto second = ServeCoordinator(api_, address_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(second.status().message().find(address_), absl::string_view::npos);
}

// A socket that accepts and never answers, as a stopped process does.
TEST(CoordinatorRpcMute, PeerThatNeverAnswers_IsDeadlineExceededInTime) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(fd, 8), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string at = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  const absl::Time began = absl::Now();
  const absl::Status status = ConnectCoordinator(at, absl::Milliseconds(300))->View().status();
  close(fd);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find(at), absl::string_view::npos) << status;
  EXPECT_LT(absl::Now() - began, absl::Seconds(3));
}

}  // namespace
}  // namespace kvt
