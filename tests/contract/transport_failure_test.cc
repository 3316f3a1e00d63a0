// What every transport does when a peer stops, dies or goes away.
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "tests/contract/transport_fixture.h"

namespace kvt {
namespace {

using TransportFailureTest = TransportTest;
INSTANTIATE_TEST_SUITE_P(All, TransportFailureTest,
                         testing::Values(Backend::kLoopback, Backend::kShm, Backend::kUcx), NameOf);

TEST_P(TransportFailureTest, StoppedPeer_BurstsEndByTheirDeadlineAndChannelCloses) {
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

TEST_P(TransportFailureTest, KilledPeer_MidBurst_EveryBurstEndsSoon) {
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

TEST_P(TransportFailureTest, StoppedClient_OthersAreServedAndItsPinsComeBack) {
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
