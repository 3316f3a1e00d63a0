// Stores whose answers are lost, doubled, of something else, or announce what never comes (F3), and
// late ones (F2): every burst ends by its deadline with a typed result, once, and nothing is written
// to its memory afterwards.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "kernels/base/random.h"
#include "tests/contract/lying_store.h"
#include "tests/contract/transport_fixture.h"

namespace kvt {
namespace {

constexpr absl::Duration kSoon = absl::Milliseconds(500);
// From a deadline until the burst must have ended, on a loaded machine.
constexpr absl::Duration kSlack = absl::Seconds(10);

using TransportFaultTest = TransportTest;
INSTANTIATE_TEST_SUITE_P(All, TransportFaultTest,
                         testing::Values(Backend::kLoopback, Backend::kShm, Backend::kUcx), NameOf);

// Whole records of a lying store: generation 1, whatever it holds.
std::unique_ptr<TestBurst> Pieces(uint32_t count) {
  auto burst = std::make_unique<TestBurst>(count, 30, kSlot);
  for (uint32_t i = 0; i < count; ++i) {
    burst->SetPiece(i, MakeRecordHandle(i, 1), 0);
    burst->FillSources(i, i, 1);
  }
  return burst;
}

std::unique_ptr<Channel> Attach(Transport& transport, const std::string& address) {
  auto channel = transport.Connect(address, TestToken(), In(kPatience));
  EXPECT_TRUE(channel.ok()) << channel.status();
  return channel.ok() ? std::move(*channel) : nullptr;
}

void ExpectMissedDeadline(Channel& channel, bool push) {
  auto burst = Pieces(4);
  const absl::Time start = RealClock::Get().Now();
  ASSERT_TRUE((push ? burst->Push(channel, In(kSoon), PushChecksums::kNone)
                    : burst->Pull(channel, In(kSoon)))
                  .ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(burst->Await().status)) << burst->Await().status;
  EXPECT_LT(RealClock::Get().Now() - start, kSoon + kSlack);
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(burst->status(i), PieceStatus::kNotAttempted);
  EXPECT_FALSE(channel.IsOpen());
}

TEST_P(TransportFaultTest, F3_CompletionLost_IsAMissedDeadlineNotAWait) {
  if (GetParam() == Backend::kLoopback) {
    for (const bool push : {true, false}) {
      handles_.clear();
      channel_.reset();
      StartHere(4);
      static_cast<LoopbackServer&>(*server_).Faults().DropNext(1);
      ExpectMissedDeadline(*channel_, push);
    }
    return;
  }
  transport_ = MakeTransport(GetParam());
  if (GetParam() == Backend::kShm) {
    LyingShmStore store;
    channel_ = Attach(*transport_, store.Address());
    ExpectMissedDeadline(*channel_, true);
    channel_.reset();
    return;
  }
  for (const bool push : {true, false}) {
    LyingUcxStore store([](LyingUcxStore&, const UcxReceived&) {});
    channel_ = Attach(*transport_, store.Address());
    ExpectMissedDeadline(*channel_, push);
    channel_.reset();
  }
}

// ---- shared memory ----

TEST(ShmFaultTest, F3_CompletionTwiceOrOfAnotherMessage_ClosesTheChannelWithATypedError) {
  auto transport = MakeTransport(Backend::kShm);
  const auto answer = [&](auto change, bool first_is_true) {
    LyingShmStore store;
    auto channel = Attach(*transport, store.Address());
    auto burst = Pieces(1);
    ASSERT_TRUE(burst->Push(*channel, In(kPatience), PushChecksums::kNone).ok());
    const std::vector<RingMessage> messages = store.AwaitMessages(1, kPatience);
    ASSERT_EQ(messages.size(), 1u);
    RingAnswer right;
    right.id = messages[0].id;
    right.count = messages[0].count;
    if (first_is_true) {
      store.Answer(right);
      const BurstResult result = burst->Await();
      EXPECT_TRUE(result.status.ok()) << result.status;
      EXPECT_EQ(result.pieces_ok, 1u);
    }
    change(right);
    store.Answer(right);
    const absl::Time end = In(kPatience);
    while (channel->IsOpen() && RealClock::Get().Now() < end) std::this_thread::yield();
    EXPECT_FALSE(channel->IsOpen());
    if (!first_is_true) {
      EXPECT_TRUE(absl::IsUnavailable(burst->Await().status)) << burst->Await().status;
    }
    channel.reset();
  };
  answer([](RingAnswer&) {}, true);
  answer([](RingAnswer& wrong) { wrong.id += 1; }, false);
  answer([](RingAnswer& wrong) { wrong.count += 1; }, false);
  answer([](RingAnswer& wrong) { wrong.statuses[0] = static_cast<PieceStatus>(200); }, false);
}

// ---- ucx ----

// What a store heard, kept until the test answers it.
struct Heard {
  Mutex mu;
  CondVar changed;
  std::deque<UcxHeader> headers ABSL_GUARDED_BY(mu);

  LyingUcxStore::Script Keep() {
    return [this](LyingUcxStore&, const UcxReceived& message) {
      MutexLock lock(mu);
      headers.push_back(message.header);
      changed.NotifyAll();
    };
  }
  UcxHeader Next() {
    const absl::Time end = In(kPatience);
    MutexLock lock(mu);
    while (headers.empty() && RealClock::Get().Now() < end) changed.WaitFor(mu, absl::Seconds(1));
    KVT_CHECK(!headers.empty(), "the store heard nothing");
    const UcxHeader header = headers.front();
    headers.pop_front();
    return header;
  }
};

UcxHeader AckOf(const UcxHeader& push) {
  UcxHeader ack;
  ack.type = UcxMessageType::kPushAck;
  ack.request = push.request;
  ack.count = push.count;
  return ack;
}

// `count` pieces from `first`, of `bytes` bytes.
UcxHeader DataOf(const UcxHeader& pull, uint32_t first, uint32_t count, uint32_t bytes) {
  UcxHeader data;
  data.type = UcxMessageType::kPullData;
  data.request = pull.request;
  data.first = first;
  data.count = count;
  data.bytes = bytes;
  return data;
}

class UcxFaultTest : public testing::Test {
 protected:
  UcxFaultTest() : store_(heard_.Keep()), transport_(MakeTransport(Backend::kUcx)) {
    channel_ = Attach(*transport_, store_.Address());
  }
  Heard heard_;
  LyingUcxStore store_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Channel> channel_;
  static constexpr uint32_t kRecord = 30 * kSlot;
  // A pushed record has 30 sources; a message takes 14 beside its meta.
  static constexpr int kPushMessages = 3;
};

TEST_F(UcxFaultTest, F3_CompletionTwice_CountsOnceAndOthersGoOn) {
  for (int round = 0; round < 20; ++round) {
    auto burst = Pieces(1);
    ASSERT_TRUE(burst->Push(*channel_, In(kPatience), PushChecksums::kNone).ok());
    for (int m = 0; m < kPushMessages; ++m) {
      const UcxHeader push = heard_.Next();
      store_.Send(AckOf(push), {});
      store_.Send(AckOf(push), {});
    }
    const BurstResult result = burst->Await();
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.pieces_ok, 1u);
  }
  EXPECT_TRUE(channel_->IsOpen());
  // A doubled answer to a pull: the second is of no request any more.
  auto pull = Pieces(1);
  ASSERT_TRUE(pull->Pull(*channel_, In(kPatience)).ok());
  const UcxHeader asked = heard_.Next();
  store_.Send(DataOf(asked, 0, 1, kRecord), std::vector<std::byte>(kRecord, std::byte{5}));
  store_.Send(DataOf(asked, 0, 1, kRecord), std::vector<std::byte>(kRecord, std::byte{6}));
  const BurstResult result = pull->Await();
  ASSERT_TRUE(result.status.ok()) << result.status;
  ASSERT_TRUE(store_.AwaitSent(kPatience));
  auto last = Pieces(1);
  ASSERT_TRUE(last->Push(*channel_, In(kPatience), PushChecksums::kNone).ok());
  for (int m = 0; m < kPushMessages; ++m) store_.Send(AckOf(heard_.Next()), {});
  EXPECT_TRUE(last->Await().status.ok());
  EXPECT_EQ(pull->piece_bytes(0)[100], std::byte{5});
}

TEST_F(UcxFaultTest, F3_CompletionOfAnotherMessage_IsDroppedAndTheBurstEndsByItsDeadline) {
  auto burst = Pieces(1);
  ASSERT_TRUE(burst->Push(*channel_, In(kSoon), PushChecksums::kNone).ok());
  UcxHeader ack = AckOf(heard_.Next());
  ack.request += uint64_t{1} << 32;  // a generation that was never sent
  store_.Send(ack, {});
  EXPECT_TRUE(absl::IsDeadlineExceeded(burst->Await().status)) << burst->Await().status;
}

TEST_F(UcxFaultTest, F3_HalfOfTheAnswer_KeepsWhatCameAndEndsByTheDeadline) {
  auto burst = Pieces(4);
  ASSERT_TRUE(burst->Pull(*channel_, In(kSoon)).ok());
  const UcxHeader asked = heard_.Next();
  ASSERT_EQ(asked.count, 4u);
  store_.Send(DataOf(asked, 0, 2, 2 * kRecord), std::vector<std::byte>(2 * kRecord));
  const BurstResult result = burst->Await();
  EXPECT_TRUE(absl::IsDeadlineExceeded(result.status)) << result.status;
  EXPECT_EQ(result.pieces_ok, 2u);
  EXPECT_EQ(burst->status(0), PieceStatus::kOk);
  EXPECT_EQ(burst->status(2), PieceStatus::kNotAttempted);
  EXPECT_FALSE(channel_->IsOpen());
}

TEST(UcxFaults, F3_AnnouncedButNeverSent_ClosesTheChannelWithATypedError) {
  auto transport = MakeTransport(Backend::kUcx);
  const uint32_t record = 30 * kSlot;
  const auto lie = [&](absl::string_view what, auto answer) {
    SCOPED_TRACE(what);
    Heard heard;
    LyingUcxStore store(heard.Keep());
    auto channel = Attach(*transport, store.Address());
    auto burst = Pieces(2);
    ASSERT_TRUE(burst->Pull(*channel, In(kPatience)).ok());
    UcxHeader data = DataOf(heard.Next(), 0, 2, 2 * record);
    std::vector<std::byte> bytes(2 * record);
    answer(data, bytes);
    store.Send(data, std::move(bytes));
    const absl::Status status = burst->Await().status;
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_FALSE(channel->IsOpen());
    channel.reset();
  };
  using Bytes = std::vector<std::byte>;
  lie("pieces without bytes", [](UcxHeader& data, Bytes& bytes) {
    data.bytes = 0;
    bytes.clear();
  });
  lie("fewer bytes than said", [](UcxHeader&, Bytes& bytes) { bytes.resize(100); });
  lie("bytes of no piece", [&](UcxHeader& data, Bytes&) { data.count = 1; });
  lie("another first piece", [](UcxHeader& data, Bytes&) { data.first = 1; });
  lie("more pieces than asked for", [](UcxHeader& data, Bytes&) { data.count = 15; });
  lie("a count beyond all", [](UcxHeader& data, Bytes&) { data.count = 0xffffffff; });
  lie("bytes skipped", [](UcxHeader& data, Bytes&) { data.skip = 64; });
  lie("an unknown verdict", [](UcxHeader& data, Bytes&) {
    data.statuses[1] = static_cast<PieceStatus>(PieceStatusesIn(kTransportWireVersion));
  });
  lie("a request that nobody made", [](UcxHeader& data, Bytes&) { data.request = 4711; });
  lie("a message of the worker's", [](UcxHeader& data, Bytes&) { data.type = UcxMessageType::kPull; });
}

// The endpoint is closed by force before the burst is told to have ended: what the peer sends later
// reaches nobody.
TEST_F(UcxFaultTest, F2_AnswerAfterTheDeadline_TouchesTheMemoryNoMore) {
  auto burst = Pieces(2);
  ASSERT_TRUE(burst->Pull(*channel_, In(kSoon)).ok());
  const UcxHeader asked = heard_.Next();
  store_.Send(DataOf(asked, 0, 1, kRecord), std::vector<std::byte>(kRecord, std::byte{1}));
  EXPECT_TRUE(absl::IsDeadlineExceeded(burst->Await().status));
  std::memset(burst->piece_bytes(0), 0x55, 2 * kRecord);
  store_.Send(DataOf(asked, 1, 1, kRecord), std::vector<std::byte>(kRecord, std::byte{2}));
  ASSERT_TRUE(store_.AwaitSent(kPatience));
  // The same memory, used again over another connection to an honest store, is that store's alone.
  auto resolver = MakeResolver(2);
  const uint64_t handle = resolver->Seal(0);
  auto server = StartServer(Backend::kUcx, *resolver);
  auto other = Attach(*transport_, server->Address());
  TestBurst next(1, 30, kSlot);
  next.SetPiece(0, handle, 0);
  ASSERT_TRUE(next.Pull(*other, In(kPatience)).ok());
  ASSERT_TRUE(next.Await().status.ok());
  EXPECT_TRUE(next.Matches(0, 0, 1));
  for (uint32_t i = 0; i < 2 * kRecord; ++i) {
    ASSERT_EQ(burst->piece_bytes(0)[i], std::byte{0x55}) << i;
  }
  other.reset();
}

TEST(UcxFaults, F3_RandomAnswers_NeverCrashAndEveryBurstEnds) {
  constexpr uint64_t kSeed = 20261130;
  SCOPED_TRACE(kSeed);
  Random random(kSeed);
  auto transport = MakeTransport(Backend::kUcx);
  for (int round = 0; round < 40; ++round) {
    Heard heard;
    LyingUcxStore store(heard.Keep());
    auto channel = Attach(*transport, store.Address());
    auto pull = Pieces(3);
    auto push = Pieces(1);
    ASSERT_TRUE(pull->Pull(*channel, In(kSoon)).ok());
    ASSERT_TRUE(push->Push(*channel, In(kSoon), PushChecksums::kNone).ok());
    const UcxHeader first = heard.Next();
    for (int m = 0; m < 6; ++m) {
      UcxHeader header;
      header.type = static_cast<UcxMessageType>(random.Below(9));
      header.request = random.Below(2) == 0 ? first.request : random.Next();
      header.first = static_cast<uint32_t>(random.Below(3));
      header.count = static_cast<uint32_t>(random.Below(2) == 0 ? random.Below(4) : random.Next());
      header.skip = static_cast<uint32_t>(random.Below(2) == 0 ? 0 : random.Next());
      std::vector<std::byte> bytes(random.Below(4) * 30 * kSlot + random.Below(2) * random.Below(999));
      header.bytes = static_cast<uint32_t>(random.Below(3) == 0 ? random.Next() : bytes.size());
      for (PieceStatus& status : header.statuses) {
        status = static_cast<PieceStatus>(random.Below(3) == 0 ? random.Below(256) : 0);
      }
      store.Send(header, std::move(bytes));
    }
    for (TestBurst* burst : {pull.get(), push.get()}) {
      const absl::Status status = burst->Await().status;
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status))
          << status;
    }
    channel.reset();
  }
}

}  // namespace
}  // namespace kvt
