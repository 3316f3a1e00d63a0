// Peers that send what they should not: every message is refused with a typed answer or by closing
// that connection alone; nothing crashes and the other client is served.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <deque>
#include <thread>

#include "absl/strings/strip.h"
#include "kernels/base/random.h"
#include "kvstore/media/unix_socket.h"
#include "kvstore/transport/attach_message.h"
#include "kvstore/transport/push_ring.h"
#include "kvstore/transport/ucx_worker.h"
#include "tests/contract/transport_fixture.h"

namespace kvt {
namespace {

template <typename T>
std::vector<std::byte> BytesOf(const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  return std::vector<std::byte>(bytes, bytes + sizeof(value));
}

class MalformedTest : public testing::Test {
 protected:
  void Start(Backend backend) {
    resolver_ = MakeResolver(8);
    for (uint32_t i = 0; i < 8; ++i) handles_.push_back(resolver_->Seal(i));
    server_ = StartServer(backend, *resolver_);
    transport_ = MakeTransport(backend);
    auto channel = transport_->Connect(server_->Address(), TestToken(), In(kPatience));
    ASSERT_TRUE(channel.ok()) << channel.status();
    good_ = std::move(*channel);
  }
  // The well-behaved client still gets its bytes, and only it is attached and counted.
  void ExpectServerWell() {
    TestBurst burst(8, 30, kSlot);
    for (uint32_t i = 0; i < 8; ++i) {
      burst.SetPiece(i, handles_[i], 0);
      burst.SetChecksums(i, i, resolver_->Checksums(i));
    }
    ASSERT_TRUE(burst.Pull(*good_, In(kPatience)).ok());
    ASSERT_EQ(burst.Await().pieces_ok, 8u);
  }
  void ExpectOnlyTheGoodOneLeft() {
    const absl::Time end = In(kPatience);
    // A send's completion reaches the server after the client has the bytes.
    while ((resolver_->attached() > 1 || resolver_->in_flight() > 0) &&
           RealClock::Get().Now() < end) {
      std::this_thread::yield();
    }
    EXPECT_EQ(resolver_->attached(), 1);
    EXPECT_EQ(resolver_->in_flight(), 0);
  }
  std::unique_ptr<ArenaResolver> resolver_;
  std::unique_ptr<TransportServer> server_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Channel> good_;
  std::vector<uint64_t> handles_;
};

// ---- ucx ----

// A client that sends whatever it is told.
class RawUcxPeer final : public UcxClient {
 public:
  explicit RawUcxPeer(const std::string& address) {
    UcxOptions options;
    options.tls = "tcp";
    options.net_devices = "lo";
    worker_ = std::move(*UcxWorker::Create(options));
    address_ = *ParseSocketAddress(absl::StripPrefix(address, "ucx:"));
    worker_->Start(*this);
  }
  ~RawUcxPeer() override { worker_->Stop(); }

  void Send(const UcxHeader& header, std::vector<std::byte> payload) {
    MutexLock lock(mu_);
    queue_.push_back({{header, {}}, std::move(payload)});
    worker_->Wake();
  }
  void SendRawHeader(std::vector<std::byte> header) {
    MutexLock lock(mu_);
    queue_.push_back({{UcxHeader{}, std::move(header)}, {}});
    worker_->Wake();
  }
  // Attaches well; returns the connection's id.
  uint64_t Attach() {
    UcxHeader header;
    header.type = UcxMessageType::kAttach;
    Send(header, BytesOf(MakeAttachHello(TestToken(), UcxSettings(), 5)));
    const absl::StatusOr<AttachReply> reply = AwaitReply();
    KVT_CHECK(reply.ok(), reply.status().ToString());
    return reply->connection;
  }
  absl::StatusOr<AttachReply> AwaitReply() {
    MutexLock lock(mu_);
    const absl::Time end = In(kPatience);
    while (reply_.empty() && !closed_ && RealClock::Get().Now() < end) {
      changed_.WaitFor(mu_, absl::Seconds(1));
    }
    return CheckAttachReply(reply_);
  }
  bool AwaitClosed() {
    MutexLock lock(mu_);
    const absl::Time end = In(kPatience);
    while (!closed_ && RealClock::Get().Now() < end) changed_.WaitFor(mu_, absl::Seconds(1));
    return closed_;
  }
  // Until all that was queued has been handed to UCX, or the server has closed.
  void AwaitSent() {
    MutexLock lock(mu_);
    const absl::Time end = In(kPatience);
    while ((!queue_.empty() || unsent_ > 0) && !closed_ && RealClock::Get().Now() < end) {
      changed_.WaitFor(mu_, absl::Seconds(1));
    }
  }

  bool Poll(absl::Time, bool) override {
    if (ep_ == nullptr && !gone_) Connect();
    bool close = worker_->stopping();
    {
      MutexLock lock(mu_);
      close |= closed_;
    }
    if (close && ep_ != nullptr) {
      gone_ = true;
      UcxForceClose(
          *worker_, std::exchange(ep_, nullptr),
          [](void* self) { static_cast<RawUcxPeer*>(self)->drained_ = true; }, this);
      return true;
    }
    while (ep_ != nullptr) {
      {
        MutexLock lock(mu_);
        if (queue_.empty()) return false;
        sent_.push_back(std::make_unique<Slot>());
        Slot& slot = *sent_.back();
        slot.peer = this;
        slot.header = queue_.front().first.first;
        slot.raw = std::move(queue_.front().first.second);
        slot.payload = std::move(queue_.front().second);
        queue_.pop_front();
        ++unsent_;
      }
      SendSlot(*sent_.back());
    }
    return false;
  }
  absl::Time NextTimer() const override { return absl::InfiniteFuture(); }
  void OnMessage(const UcxReceived& message) override {
    if (message.header.type != UcxMessageType::kAttachReply) return;
    MutexLock lock(mu_);
    reply_.assign(message.payload.begin(), message.payload.end());
    changed_.NotifyAll();
  }
  void OnMalformed(ucp_ep_h) override {}
  bool Drained() const override { return drained_; }

 private:
  struct Slot : UcxSlot {
    RawUcxPeer* peer = nullptr;
    std::vector<std::byte> raw;  // sent instead of the header
    std::vector<std::byte> payload;
  };
  void SendSlot(Slot& slot) {
    slot.sent = [](UcxSlot* self, ucs_status_t) {
      RawUcxPeer* peer = static_cast<Slot*>(self)->peer;
      MutexLock lock(peer->mu_);
      --peer->unsent_;
      peer->changed_.NotifyAll();
    };
    if (slot.raw.empty()) {
      UcxPayload payload;
      payload.data = slot.payload.data();
      payload.size = slot.payload.size();
      return UcxSendMessage(ep_, slot, payload, UcxReply::kWanted);
    }
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY;
    void* request =
        ucp_am_send_nbx(ep_, kUcxMessageId, slot.raw.data(), slot.raw.size(), nullptr, 0, &param);
    if (UCS_PTR_IS_PTR(request)) ucp_request_free(request);
    slot.sent(&slot, UCS_OK);
  }
  void Connect() {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR |
                        UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address_.storage);
    params.sockaddr.addrlen = address_.size;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.arg = this;
    params.err_handler.cb = [](void* self, ucp_ep_h, ucs_status_t) {
      auto* peer = static_cast<RawUcxPeer*>(self);
      MutexLock lock(peer->mu_);
      peer->closed_ = true;
      peer->changed_.NotifyAll();
      peer->worker_->Wake();
    };
    KVT_CHECK(ucp_ep_create(worker_->worker(), &params, &ep_) == UCS_OK);
  }

  std::unique_ptr<UcxWorker> worker_;
  UcxSocketAddress address_;
  ucp_ep_h ep_ = nullptr;
  bool gone_ = false;
  bool drained_ = false;
  std::vector<std::unique_ptr<Slot>> sent_;
  Mutex mu_;
  CondVar changed_;
  std::deque<std::pair<std::pair<UcxHeader, std::vector<std::byte>>, std::vector<std::byte>>> queue_
      ABSL_GUARDED_BY(mu_);
  int unsent_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<std::byte> reply_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

class UcxMalformedTest : public MalformedTest {
 protected:
  void SetUp() override { Start(Backend::kUcx); }
  UcxHeader Header(UcxMessageType type, uint64_t connection) {
    UcxHeader header;
    header.type = type;
    header.channel = connection;
    return header;
  }
  // A whole, good piece.
  Piece GoodPiece() {
    Piece piece;
    piece.ticket = 1;
    piece.handle = handles_[0];
    piece.length = kSlot;
    return piece;
  }
};

TEST_F(UcxMalformedTest, BeforeAttach_AnythingElse_ClosesThatConnection) {
  for (const auto type : {UcxMessageType::kPull, UcxMessageType::kPush, UcxMessageType::kCancel,
                          UcxMessageType::kPullData, static_cast<UcxMessageType>(99)}) {
    const uint64_t before = server_->Stats().messages_refused;
    RawUcxPeer peer(server_->Address());
    peer.Send(Header(type, 1), BytesOf(GoodPiece()));
    EXPECT_TRUE(peer.AwaitClosed()) << static_cast<int>(type);
    EXPECT_EQ(server_->Stats().messages_refused, before + 1);
  }
  ExpectServerWell();
  ExpectOnlyTheGoodOneLeft();
}

TEST_F(UcxMalformedTest, Header_OfAnotherSizeOrMagic_ClosesThatConnection) {
  for (const size_t size : {1, 3, 63, 65, 200}) {
    RawUcxPeer peer(server_->Address());
    peer.SendRawHeader(std::vector<std::byte>(size, std::byte{7}));
    EXPECT_TRUE(peer.AwaitClosed()) << size;
  }
  RawUcxPeer peer(server_->Address());
  UcxHeader header = Header(UcxMessageType::kAttach, 0);
  header.magic ^= 1;
  peer.Send(header, {});
  EXPECT_TRUE(peer.AwaitClosed());
  ExpectServerWell();
}

TEST_F(UcxMalformedTest, Hello_WrongVersionSettingsOrSize_IsRefusedWithBothSidesNamed) {
  const auto attach = [&](auto change) {
    AttachHello hello = MakeAttachHello(TestToken(), UcxSettings(), 5);
    change(hello);
    RawUcxPeer peer(server_->Address());
    peer.Send(Header(UcxMessageType::kAttach, 0), BytesOf(hello));
    return peer.AwaitReply().status();
  };
  absl::Status status = attach([](AttachHello& hello) {
    hello.version_min = 7;
    hello.version_max = 9;
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.message().find("7 to 9"), std::string::npos);
  status = attach([](AttachHello& hello) { hello.receive_segment_bytes = 65536; });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.message().find("65536"), std::string::npos);
  EXPECT_NE(status.message().find("1056768"), std::string::npos);
  status = attach([](AttachHello& hello) { hello.geometry_fingerprint ^= 1; });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  status = attach([](AttachHello& hello) { hello.magic = 0; });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  status = attach([](AttachHello& hello) { hello.head_dim = 1u << 30; });
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  RawUcxPeer peer(server_->Address());
  peer.Send(Header(UcxMessageType::kAttach, 0), std::vector<std::byte>(3));
  EXPECT_TRUE(absl::IsInvalidArgument(peer.AwaitReply().status()));
  ExpectServerWell();
}

TEST_F(UcxMalformedTest, AttachedClient_LyingMessages_ClosesThatConnection) {
  const auto lie = [&](absl::string_view what, auto make) {
    RawUcxPeer peer(server_->Address());
    const uint64_t connection = peer.Attach();
    UcxHeader header = Header(UcxMessageType::kPull, connection);
    header.count = 1;
    std::vector<std::byte> payload = BytesOf(GoodPiece());
    make(header, payload);
    peer.Send(header, std::move(payload));
    EXPECT_TRUE(peer.AwaitClosed()) << what;
  };
  using Bytes = std::vector<std::byte>;
  lie("no pieces", [](UcxHeader& header, Bytes&) { header.count = 0; });
  lie("too many", [](UcxHeader& header, Bytes&) { header.count = 0xffffffff; });
  lie("another size", [](UcxHeader& header, Bytes&) { header.count = 2; });
  lie("another connection", [](UcxHeader& header, Bytes&) { header.channel += 1; });
  lie("second attach", [](UcxHeader& header, Bytes&) { header.type = UcxMessageType::kAttach; });
  lie("type of the store",
      [](UcxHeader& header, Bytes&) { header.type = UcxMessageType::kPushAck; });
  const auto piece = [&](auto change) {
    return [change, this](UcxHeader&, Bytes& payload) {
      Piece bad = GoodPiece();
      change(bad);
      payload = BytesOf(bad);
    };
  };
  lie("unaligned", piece([](Piece& bad) { bad.offset = 4; }));
  lie("empty", piece([](Piece& bad) { bad.length = 0; }));
  lie("reserved", piece([](Piece& bad) { bad.reserved = 1; }));
  const auto push = [&](uint32_t count, uint32_t bytes, size_t payload_bytes) {
    return [=](UcxHeader& header, Bytes& payload) {
      header.type = UcxMessageType::kPush;
      header.has_checksums = 1;
      header.count = count;
      header.bytes = bytes;
      payload.resize(payload_bytes);
    };
  };
  lie("push of nothing", push(0, 0, 0));
  lie("push of more than it has", push(1, kSlot, 100));
  lie("push of more than allowed", push(1, 1u << 31, 100));
  lie("push of too many", push(16, kSlot, kSlot + 16 * 32 + 24));
  lie("push whose piece is another size", push(1, 2 * kSlot, 2 * kSlot + 32 + 48));
  ExpectServerWell();
  ExpectOnlyTheGoodOneLeft();
}

// A peer that asks for more than its credits is cut off: what waits for it at the store is bounded.
TEST_F(UcxMalformedTest, MorePullsThanAgreed_ClosesThatConnection) {
  RawUcxPeer peer(server_->Address());
  UcxHeader header = Header(UcxMessageType::kPull, peer.Attach());
  header.count = kRequestPiecesMax;
  std::vector<std::byte> payload;
  for (uint32_t i = 0; i < header.count; ++i) {
    const std::vector<std::byte> piece = BytesOf(GoodPiece());
    payload.insert(payload.end(), piece.begin(), piece.end());
  }
  for (uint32_t i = 0; i < 5 * kRequestsInFlightMax; ++i) {
    header.request = i;
    peer.Send(header, payload);
  }
  EXPECT_TRUE(peer.AwaitClosed());
  ExpectServerWell();
  ExpectOnlyTheGoodOneLeft();
}

TEST(UcxErrors, RegistrationThatFails_NamesSizeCauseAndRemedy) {
  for (const ucs_status_t status : {UCS_ERR_NO_MEMORY, UCS_ERR_IO_ERROR, UCS_ERR_UNSUPPORTED,
                                    UCS_ERR_INVALID_ADDR, UCS_ERR_EXCEEDS_LIMIT}) {
    const absl::Status error = UcxRegistrationError(uint64_t{3} << 30, status);
    EXPECT_FALSE(error.ok());
    EXPECT_NE(error.message().find("3"), std::string::npos) << error;
    EXPECT_NE(error.message().find(ucs_status_string(status)), std::string::npos) << error;
    const bool limit = status == UCS_ERR_NO_MEMORY;
    EXPECT_NE(error.message().find(limit ? "ulimit -l" : "kvtide doctor"), std::string::npos)
        << error;
  }
  EXPECT_TRUE(absl::IsResourceExhausted(UcxRegistrationError(1, UCS_ERR_NO_MEMORY)));
}

TEST_F(UcxMalformedTest, RandomMessages_NeverCrash) {
  constexpr uint64_t kSeed = 20261129;
  SCOPED_TRACE(kSeed);
  Random random(kSeed);
  for (int round = 0; round < 60; ++round) {
    RawUcxPeer peer(server_->Address());
    const uint64_t connection = peer.Attach();
    for (int m = 0; m < 4; ++m) {
      UcxHeader header = Header(static_cast<UcxMessageType>(random.Below(9)), connection);
      header.request = random.Next();
      header.count = static_cast<uint32_t>(random.Below(2) == 0 ? random.Below(20) : random.Next());
      header.bytes =
          static_cast<uint32_t>(random.Below(2) == 0 ? random.Below(9000) : random.Next());
      header.skip = static_cast<uint32_t>(random.Next());
      header.has_checksums = static_cast<uint16_t>(random.Below(2));
      std::vector<std::byte> payload(random.Below(3) == 0 ? header.count % 64 * sizeof(Piece)
                                                          : random.Below(20'000));
      for (std::byte& byte : payload) byte = static_cast<std::byte>(random.Next());
      // Some are pieces that nearly fit.
      for (size_t at = 0; at + sizeof(Piece) <= payload.size() && random.Below(2) == 0;
           at += sizeof(Piece)) {
        Piece piece = GoodPiece();
        piece.offset = static_cast<uint32_t>(random.Next()) / 64 * 64;
        piece.length = static_cast<uint32_t>(random.Next()) / 64 * 64;
        std::memcpy(payload.data() + at, &piece, sizeof(piece));
      }
      peer.Send(header, std::move(payload));
    }
    peer.AwaitSent();
  }
  ExpectServerWell();
  ExpectOnlyTheGoodOneLeft();
}

// ---- shared memory ----

class ShmMalformedTest : public MalformedTest {
 protected:
  void SetUp() override { Start(Backend::kShm); }
  UniqueFd Connect() {
    auto socket = ConnectUnix(absl::StripPrefix(server_->Address(), "shm:"), In(kPatience));
    KVT_CHECK(socket.ok(), socket.status().ToString());
    return std::move(*socket);
  }
  absl::StatusOr<FdMessage> Say(const UniqueFd& socket, const std::vector<std::byte>& bytes) {
    KVT_CHECK(SendFdMessage(socket.get(), bytes, {}, In(kPatience)).ok());
    return ReceiveFdMessage(socket.get(), In(kPatience));
  }
  // Attaches well; the ring and the doorbell stand in the answer.
  FdMessage Attach(const UniqueFd& socket) {
    auto answer = Say(socket, BytesOf(MakeAttachHello(TestToken(), TransportSettings{}, 0)));
    KVT_CHECK(answer.ok() && answer->fds.size() == 5, answer.status().ToString());
    return std::move(*answer);
  }
  void ExpectClosed(const UniqueFd& socket) {
    EXPECT_TRUE(absl::IsUnavailable(ReceiveFdMessage(socket.get(), In(kPatience)).status()));
  }
};

TEST_F(ShmMalformedTest, Hello_GarbageOrWrongVersion_IsRefused) {
  for (const size_t size : {1, 79, 81, 4096}) {
    const UniqueFd socket = Connect();
    const auto answer = Say(socket, std::vector<std::byte>(size, std::byte{9}));
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_TRUE(answer->fds.empty());
    EXPECT_TRUE(absl::IsInvalidArgument(CheckAttachReply(answer->bytes).status()));
    ExpectClosed(socket);
  }
  AttachHello hello = MakeAttachHello(TestToken(), TransportSettings{}, 0);
  hello.version_min = hello.version_max = 12;
  const UniqueFd socket = Connect();
  const auto answer = Say(socket, BytesOf(hello));
  ASSERT_TRUE(answer.ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckAttachReply(answer->bytes).status()));
  EXPECT_TRUE(answer->fds.empty());
  ExpectServerWell();
  ExpectOnlyTheGoodOneLeft();
}

TEST_F(ShmMalformedTest, AfterAttach_AnyMessage_ClosesThatConnection) {
  const UniqueFd socket = Connect();
  const FdMessage answer = Attach(socket);
  ASSERT_TRUE(SendFdMessage(socket.get(), std::vector<std::byte>(8), {}, In(kPatience)).ok());
  ExpectClosed(socket);
  ExpectServerWell();
  ExpectOnlyTheGoodOneLeft();
}

TEST_F(ShmMalformedTest, Arena_MappedByAClient_CannotBeWritten) {
  const UniqueFd socket = Connect();
  FdMessage answer = Attach(socket);
  EXPECT_FALSE(SharedMapping::MapWritable(std::move(answer.fds[0]), SharedMappingOptions{}).ok());
  EXPECT_FALSE(SharedMapping::MapWritable(std::move(answer.fds[1]), SharedMappingOptions{}).ok());
}

TEST_F(ShmMalformedTest, Ring_BrokenByItsClient_ClosesThatConnection) {
  constexpr uint64_t kSeed = 77;
  SCOPED_TRACE(kSeed);
  Random random(kSeed);
  for (int round = 0; round < 60; ++round) {
    const UniqueFd socket = Connect();
    FdMessage answer = Attach(socket);
    auto ring = SharedMapping::MapWritable(std::move(answer.fds[2]), SharedMappingOptions{});
    ASSERT_TRUE(ring.ok()) << ring.status();
    auto& control = *reinterpret_cast<RingControl*>(ring->mutable_data());
    RingMessage message;
    message.magic = kRingMagic;
    message.kind = RingKind::kPush;
    message.total = 64 + 64 + kSlot;
    message.count = 1;
    message.data_bytes = kSlot;
    uint64_t head = message.total;
    switch (round % 10) {
      case 0:
        head = kPushRingBytes + 64;
        break;
      case 1:
        head = ~uint64_t{0};
        break;
      case 2:
        message.magic = 0;
        break;
      case 3:
        message.total = 63;
        break;
      case 4:
        message.total = 0;
        break;
      case 5:
        message.count = 1000;
        break;
      case 6:
        message.data_bytes = 0xffffffc0;
        break;
      case 7:
        message.kind = RingKind::kPad;
        break;
      case 8:
        message.has_checksums = 1;
        break;  // meta of another size
      default:
        message.total = static_cast<uint32_t>(random.Next());
        message.count = static_cast<uint32_t>(random.Next());
        message.data_bytes = static_cast<uint32_t>(random.Next());
        break;
    }
    std::byte* data = ring->mutable_data() + kRingDataOffset;
    std::memcpy(data, &message, sizeof(message));
    for (size_t i = 0; i < 256; ++i) {
      data[sizeof(message) + i] = static_cast<std::byte>(random.Next());
    }
    control.head.store(head, std::memory_order_seq_cst);
    const uint64_t one = 1;
    ASSERT_EQ(write(answer.fds[3].get(), &one, sizeof(one)), 8);
    ExpectClosed(socket);
  }
  EXPECT_EQ(server_->Stats().messages_refused, 60u);
  ExpectServerWell();
  ExpectOnlyTheGoodOneLeft();
}

}  // namespace
}  // namespace kvt
