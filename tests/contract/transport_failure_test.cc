// What every transport does when a peer stops, dies or goes away.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "tests/contract/transport_fixture.h"

namespace kvt {
namespace {

using TransportFailureTest = TransportTest;
INSTANTIATE_TEST_SUITE_P(All, TransportFailureTest,
                         testing::Values(Backend::kLoopback, Backend::kShm, Backend::kUcx), NameOf);

TEST_P(TransportFailureTest, F2_StoppedPeer_BurstsEndByTheirDeadlineAndChannelCloses) {
  StartVictim(16);
  victim_->Stop();
  TestBurst push(16, 30, kSlot);
  for (uint32_t i = 0; i < 16; ++i) {
    push.SetPiece(i, handles_[i], 0);
    push.FillSources(i, i, 1);
  }
  TestBurst pull(16, 30, kSlot);
  for (uint32_t i = 0; i < 16; ++i) pull.SetPiece(i, handles_[i], 0);
  const absl::Time start = RealClock::Get().Now();
  ASSERT_TRUE(push.Push(*channel_, In(absl::Seconds(1)), PushChecksums::kNone).ok());
  ASSERT_TRUE(pull.Pull(*channel_, In(absl::Seconds(1))).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(push.Await().status)) << push.Await().status;
  const absl::Status pulled = pull.Await().status;
  // Shared memory needs no peer to read.
  if (GetParam() != Backend::kShm) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(pulled) || absl::IsUnavailable(pulled)) << pulled;
  } else {
    EXPECT_TRUE(pulled.ok()) << pulled;
  }
  EXPECT_LT(RealClock::Get().Now() - start, absl::Seconds(10));
  EXPECT_FALSE(channel_->IsOpen());
  auto nobody = transport_->Connect(victim_->Address(), TestToken(), In(absl::Milliseconds(300)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(nobody.status())) << nobody.status();

  victim_->Continue();
  auto channel = transport_->Connect(victim_->Address(), TestToken(), In(kPatience));
  ASSERT_TRUE(channel.ok()) << channel.status();
  TestBurst again(16, 30, kSlot);
  for (uint32_t i = 0; i < 16; ++i) again.SetPiece(i, handles_[i], 0);
  ASSERT_TRUE(again.Pull(**channel, In(kPatience)).ok());
  EXPECT_TRUE(again.Await().status.ok());
  for (uint32_t i = 0; i < 16; ++i) EXPECT_TRUE(again.Matches(i, i, 1));
}

TEST_P(TransportFailureTest, F2_KilledPeer_MidBurst_EveryBurstEndsSoon) {
  for (int round = 0; round < 3; ++round) {
    handles_.clear();
    channel_.reset();
    transport_.reset();
    victim_.reset();
    StartVictim(32);
    std::vector<std::unique_ptr<TestBurst>> bursts;
    for (int b = 0; b < 8; ++b) {
      bursts.push_back(std::make_unique<TestBurst>(64, 30, kSlot));
      for (uint32_t i = 0; i < 64; ++i) {
        bursts.back()->SetPiece(i, handles_[i % 32], 0);
        if (b % 2 == 1) bursts.back()->FillSources(i, i % 32, 1);
      }
    }
    for (int b = 0; b < 8; ++b) {
      ASSERT_TRUE((b % 2 == 1 ? bursts[b]->Push(*channel_, In(kPatience), PushChecksums::kNone)
                              : bursts[b]->Pull(*channel_, In(kPatience)))
                      .ok());
    }
    if (round > 0) (void)bursts[0]->Await();
    victim_->Kill();
    const absl::Time killed = RealClock::Get().Now();
    for (const auto& burst : bursts) {
      const absl::Status status = burst->Await().status;
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    }
    EXPECT_LT(RealClock::Get().Now() - killed, absl::Seconds(10));
    TestBurst late(1, 30, kSlot);
    late.SetPiece(0, handles_[0], 0);
    late.FillSources(0, 0, 1);
    if (late.Push(*channel_, In(kPatience), PushChecksums::kNone).ok()) {
      EXPECT_TRUE(absl::IsUnavailable(late.Await().status));
    }
    EXPECT_FALSE(channel_->IsOpen());
  }
}

TEST_P(TransportFailureTest, F2_StoppedClient_OthersAreServedAndItsPinsComeBack) {
  if (GetParam() == Backend::kLoopback) GTEST_SKIP() << "loopback has no client process";
  StartHere(64);
  std::string first;
  Child client({"--client", BackendName(GetParam()), server_->Address(), "64"}, &first);
  ASSERT_EQ(first, "pulling");
  client.Signal(SIGSTOP);
  for (int round = 0; round < 20; ++round) {
    TestBurst burst(64, 30, kSlot);
    for (uint32_t i = 0; i < 64; ++i) burst.SetPiece(i, handles_[i], 0);
    ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
    const BurstResult result = burst.Await();
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.pieces_ok, 64u);
  }
  client.Signal(SIGKILL);
  const absl::Time end = In(kPatience);
  while (resolver_->attached() > 1 && RealClock::Get().Now() < end) {
    std::this_thread::yield();
  }
  EXPECT_EQ(resolver_->attached(), 1);
  EXPECT_EQ(resolver_->in_flight(), 0);
}

TEST_P(TransportFailureTest, F2_OnePeerStoppedMidBurst_TheOtherPeersTrafficIsUnaffected) {
  StartVictim(16);
  auto resolver = MakeResolver(16);
  std::vector<uint64_t> handles;
  for (uint32_t i = 0; i < 16; ++i) handles.push_back(resolver->Seal(i));
  auto server = StartServer(GetParam(), *resolver);
  auto healthy = transport_->Connect(server->Address(), TestToken(), In(kPatience));
  ASSERT_TRUE(healthy.ok()) << healthy.status();
  TestBurst stuck(512, 30, kSlot);
  for (uint32_t i = 0; i < 512; ++i) {
    stuck.SetPiece(i, handles_[i % 16], 0);
    stuck.FillSources(i, i % 16, 1);
  }
  const absl::Duration kAllowed = absl::Seconds(2);
  ASSERT_TRUE(stuck.Push(*channel_, In(kAllowed), PushChecksums::kNone).ok());
  victim_->Stop();
  const absl::Time start = RealClock::Get().Now();
  int served = 0;
  absl::Duration slowest;
  while (!stuck.done() && RealClock::Get().Now() - start < kPatience) {
    TestBurst burst(16, 30, kSlot);
    for (uint32_t i = 0; i < 16; ++i) burst.SetPiece(i, handles[i], 0);
    const absl::Time asked = RealClock::Get().Now();
    ASSERT_TRUE(burst.Pull(**healthy, In(kPatience)).ok());
    ASSERT_EQ(burst.Await().pieces_ok, 16u);
    slowest = std::max(slowest, RealClock::Get().Now() - asked);
    ++served;
  }
  const absl::Status ended = stuck.Await().status;
  EXPECT_TRUE(ended.ok() || absl::IsDeadlineExceeded(ended)) << ended;
  EXPECT_LT(RealClock::Get().Now() - start, kAllowed + absl::Seconds(10));
  EXPECT_GT(served, 10);
  EXPECT_LT(slowest, kAllowed);
  healthy->reset();
}

// Readers that stop in the middle of large pulls: what the store holds for them is bounded by their
// credits, however much they asked for.
TEST_P(TransportFailureTest, SlowReaders_MakeTheStoreHoldNoMoreThanTheirCredits) {
  if (GetParam() != Backend::kUcx) GTEST_SKIP() << "only ucx sends: others read the arena itself";
  constexpr int kReaders = 4;
  StartHere(64);
  const auto resident_bytes = [] {
    std::ifstream statm("/proc/self/statm");
    uint64_t total = 0;
    uint64_t resident = 0;
    statm >> total >> resident;
    return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  };
  const auto serve = [&] {
    TestBurst burst(64, 30, kSlot);
    for (uint32_t i = 0; i < 64; ++i) burst.SetPiece(i, handles_[i], 0);
    ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
    ASSERT_EQ(burst.Await().pieces_ok, 64u);
  };
  serve();
  const uint64_t before = resident_bytes();
  std::vector<std::unique_ptr<Child>> readers;
  for (int i = 0; i < kReaders; ++i) {
    std::string first;
    readers.push_back(std::make_unique<Child>(
        std::vector<std::string>{"--client", "ucx", server_->Address(), "64"}, &first));
    ASSERT_EQ(first, "pulling");
    readers.back()->Signal(SIGSTOP);
  }
  for (int round = 0; round < 20; ++round) {
    ASSERT_NO_FATAL_FAILURE(serve());
    // One message of each may be prepared beyond those in flight; this channel's own are done.
    const int bound = (kReaders + 1) * (kMessagesInFlightMax + 1) * kMessagePiecesMax;
    EXPECT_LE(resolver_->in_flight(), bound);
  }
  const uint64_t grown = resident_bytes() - std::min(before, resident_bytes());
  // What the transport keeps for them, and buffers of its own for each.
  EXPECT_LE(grown, kReaders * (2 * kChannelBytesInFlightMax + 8 * kMiB));
  readers.clear();
  const absl::Time end = In(kPatience);
  while ((resolver_->attached() > 1 || resolver_->in_flight() > 0) &&
         RealClock::Get().Now() < end) {
    std::this_thread::yield();
  }
  EXPECT_EQ(resolver_->attached(), 1);
  EXPECT_EQ(resolver_->in_flight(), 0);
}

TEST_P(TransportFailureTest, Server_StopWithClients_ChannelsEndAndNothingIsHeld) {
  StartHere(32);
  std::vector<std::unique_ptr<TestBurst>> bursts;
  for (int b = 0; b < 8; ++b) {
    bursts.push_back(std::make_unique<TestBurst>(32, 30, kSlot));
    for (uint32_t i = 0; i < 32; ++i) bursts.back()->SetPiece(i, handles_[i], 0);
    ASSERT_TRUE(bursts.back()->Pull(*channel_, In(kPatience)).ok());
  }
  server_->Stop();
  EXPECT_EQ(resolver_->in_flight(), 0);
  for (const auto& burst : bursts) {
    const absl::Status status = burst->Await().status;
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
  }
}

}  // namespace
}  // namespace kvt
