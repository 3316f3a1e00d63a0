// One contract for every transport: loopback, shared memory, ucx over TCP.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <time.h>

#include <atomic>
#include <cstring>

#include "kernels/base/random.h"
#include "kernels/layout/checksum.h"
#include "tests/contract/transport_fixture.h"

namespace kvt {
namespace {

INSTANTIATE_TEST_SUITE_P(All, TransportTest,
                         testing::Values(Backend::kLoopback, Backend::kShm, Backend::kUcx), NameOf);

TEST_P(TransportTest, Pull_WholeRecordsIntoSlots_BytesAndChecksumsMatch) {
  StartHere(24);
  TestBurst burst(24, 30, kSlot);
  for (uint32_t i = 0; i < 24; ++i) {
    burst.SetPiece(i, handles_[i], 0);
    burst.SetChecksums(i, i, resolver_->Checksums(i));
  }
  ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
  const BurstResult result = burst.Await();
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.pieces_ok, 24u);
  EXPECT_EQ(result.bytes, 24u * TestGeometry().RecordBytes());
  for (uint32_t i = 0; i < 24; ++i) {
    EXPECT_EQ(burst.status(i), PieceStatus::kOk);
    EXPECT_TRUE(burst.Matches(i, i, 1)) << i;
  }
  EXPECT_EQ(channel_->Stats().bytes_pulled, result.bytes);
  channel_->Close();
  server_->Stop();
  EXPECT_EQ(resolver_->in_flight(), 0);
  EXPECT_EQ(resolver_->attached(), 0);
}

TEST_P(TransportTest, Pull_ScatteredLayersOfManySizes_BytesMatch) {
  StartHere(64);
  for (const uint32_t parts : {1u, 2u, 5u, 12u}) {
    Random random(parts);
    TestBurst burst(512, parts, kSlot);
    for (uint32_t i = 0; i < 512; ++i) {
      const auto record = static_cast<uint32_t>(random.Below(64));
      const auto layer = static_cast<uint32_t>(random.Below(31 - parts));
      burst.SetPiece(i, handles_[record], layer * kSlot);
      if (i % 2 == 0) burst.SetChecksums(i, record, resolver_->Checksums(record));
    }
    ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
    const BurstResult result = burst.Await();
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.pieces_ok, 512u);
    for (uint32_t i = 0; i < 512; ++i) {
      ASSERT_TRUE(burst.Matches(i, RecordIndexOf(burst.pull(i).piece.handle), 1)) << i;
    }
  }
}

TEST_P(TransportTest, Pull_FlippedByte_IsAMissOfThatPieceOnly) {
  StartHere(4);
  TestBurst burst(4, 30, kSlot);
  for (uint32_t i = 0; i < 4; ++i) {
    burst.SetPiece(i, handles_[i], 0);
    burst.SetChecksums(i, i, resolver_->Checksums(i));
  }
  resolver_->CorruptByte(2, 100'000);
  ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
  const BurstResult result = burst.Await();
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.pieces_ok, 3u);
  EXPECT_EQ(result.pieces_missed, 1u);
  EXPECT_EQ(burst.status(2), PieceStatus::kCorrupt);
  EXPECT_TRUE(burst.Matches(3, 3, 1));
  // Without checksums the same bytes pass: the check is what finds it.
  TestBurst blind(1, 30, kSlot);
  blind.SetPiece(0, handles_[2], 0);
  ASSERT_TRUE(blind.Pull(*channel_, In(kPatience)).ok());
  EXPECT_EQ(blind.Await().pieces_ok, 1u);
  EXPECT_FALSE(blind.Matches(0, 2, 1));
}

TEST_P(TransportTest, Pull_ChecksumOfAnotherPlace_IsCorrupt) {
  StartHere(1);
  TestBurst burst(1, 1, kSlot);
  burst.SetPiece(0, handles_[0], 0);
  burst.SetChecksums(0, 0, resolver_->Checksums(0));
  burst.pull(0).key_hash ^= 1;
  ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
  EXPECT_EQ(burst.Await().pieces_missed, 1u);
  EXPECT_EQ(burst.status(0), PieceStatus::kCorrupt);
}

TEST_P(TransportTest, Pull_StaleGenerationAndStrangers_AreMisses) {
  StartHere(4);
  TestBurst burst(4, 30, kSlot);
  for (uint32_t i = 0; i < 4; ++i) burst.SetPiece(i, handles_[i], 0);
  resolver_->Evict(0);
  (void)resolver_->Seal(1);  // the same place, another content
  burst.SetPiece(2, MakeRecordHandle(100'000, 1), 0);
  ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
  const BurstResult result = burst.Await();
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(burst.status(0), PieceStatus::kLost);
  EXPECT_EQ(burst.status(1), PieceStatus::kLost);
  EXPECT_NE(burst.status(2), PieceStatus::kOk);
  EXPECT_EQ(burst.status(3), PieceStatus::kOk);
  EXPECT_EQ(result.pieces_ok, 1u);
  EXPECT_EQ(result.pieces_missed, 3u);
}

TEST_P(TransportTest, Pull_WithoutPin_IsRefused) {
  if (GetParam() == Backend::kShm) GTEST_SKIP() << "same-host readers are trusted with the mapping";
  StartHere(2);
  TestBurst burst(2, 30, kSlot);
  burst.SetPiece(0, handles_[0], 0);
  burst.SetPiece(1, handles_[1], 0);
  burst.pull(0).piece.ticket = ArenaResolver::kForbiddenTicket;
  ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
  EXPECT_TRUE(burst.Await().status.ok());
  EXPECT_EQ(burst.status(0), PieceStatus::kRefused);
  EXPECT_EQ(burst.status(1), PieceStatus::kOk);
}

TEST_P(TransportTest, Push_FromSlots_ArrivesVerifiedWithItsChecksums) {
  StartHere(8);
  TestBurst burst(8, 30, kSlot);
  for (uint32_t i = 0; i < 8; ++i) {
    burst.SetPiece(i, resolver_->Reserve(i), 0);
    burst.FillSources(i, i, 9);
  }
  ASSERT_TRUE(burst.Push(*channel_, In(kPatience), PushChecksums::kCompute).ok());
  const BurstResult result = burst.Await();
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.pieces_ok, 8u);
  EXPECT_EQ(resolver_->committed_bytes(), 8u * TestGeometry().RecordBytes());
  for (uint32_t i = 0; i < 8; ++i) {
    EXPECT_EQ(0, std::memcmp(resolver_->data(i), burst.piece_bytes(i), 30 * kSlot)) << i;
    EXPECT_EQ(burst.checksums(i), resolver_->Checksums(i)) << i;
  }
  EXPECT_FALSE(resolver_->last_checksums().empty());
  EXPECT_EQ(resolver_->in_flight(), 0);
}

TEST_P(TransportTest, Push_OneLayerOfManyRecords_GivenAndNoChecksums) {
  StartHere(64);
  for (const PushChecksums mode : {PushChecksums::kGiven, PushChecksums::kNone}) {
    TestBurst burst(64, 1, kSlot);
    for (uint32_t i = 0; i < 64; ++i) {
      burst.SetPiece(i, resolver_->Reserve(i), 7 * kSlot);
      burst.FillSources(i, i, 3);
      for (uint32_t s = 0; s < 3; ++s) {
        burst.checksums(i)[s] =
            SliceChecksum(burst.piece_bytes(i) + s * 2048, 2048,
                          ChecksumSeed(ArenaResolver::KeyHash(i), Plane::kBase, 7 * 3 + s));
      }
    }
    ASSERT_TRUE(burst.Push(*channel_, In(kPatience), mode).ok());
    const BurstResult result = burst.Await();
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.pieces_ok, 64u);
    EXPECT_EQ(resolver_->last_checksums().size(), mode == PushChecksums::kNone ? 0u : 3u);
    for (uint32_t i = 0; i < 64; ++i) {
      ASSERT_EQ(0, std::memcmp(resolver_->data(i) + 7 * kSlot, burst.piece_bytes(i), kSlot));
    }
  }
}

TEST_P(TransportTest, Push_WrongChecksumStaleAndForbidden_AreMisses) {
  StartHere(4);
  TestBurst burst(4, 30, kSlot);
  for (uint32_t i = 0; i < 4; ++i) {
    burst.SetPiece(i, resolver_->Reserve(i), 0);
    burst.FillSources(i, i, 3);
    for (uint32_t s = 0; s < 90; ++s) {
      burst.checksums(i)[s] =
          SliceChecksum(burst.piece_bytes(i) + s * 2048, 2048,
                        ChecksumSeed(ArenaResolver::KeyHash(i), Plane::kBase, s));
    }
  }
  burst.checksums(0)[5] ^= 1;
  resolver_->Evict(1);
  burst.push(2).piece.ticket = ArenaResolver::kForbiddenTicket;
  ASSERT_TRUE(burst.Push(*channel_, In(kPatience), PushChecksums::kGiven).ok());
  const BurstResult result = burst.Await();
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(burst.status(0), PieceStatus::kCorrupt);
  EXPECT_EQ(burst.status(1), PieceStatus::kLost);
  EXPECT_EQ(burst.status(2), PieceStatus::kRefused);
  EXPECT_EQ(burst.status(3), PieceStatus::kOk);
  EXPECT_EQ(result.pieces_ok, 1u);
}

TEST_P(TransportTest, Pull_HundredThousandTinyPieces_AllArrive) {
  StartHere(32);
  TestBurst burst(100'000, 1, 2048);
  Random random(5);
  for (uint32_t i = 0; i < 100'000; ++i) {
    burst.SetPiece(i, handles_[random.Below(32)], static_cast<uint32_t>(random.Below(90)) * 2048);
  }
  ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
  const BurstResult result = burst.Await();
  ASSERT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.pieces_ok, 100'000u);
  for (uint32_t i = 0; i < 100'000; i += 997) {
    ASSERT_TRUE(burst.Matches(i, RecordIndexOf(burst.pull(i).piece.handle), 1)) << i;
  }
}

TEST_P(TransportTest, Burst_EmptyOrMalformed_CompletesOrIsRefused) {
  StartHere(1);
  TestBurst empty(0, 1, kSlot);
  ASSERT_TRUE(empty.Pull(*channel_, In(kPatience)).ok());
  EXPECT_TRUE(empty.Await().status.ok());
  TestBurst empty_push(0, 1, kSlot);
  ASSERT_TRUE(empty_push.Push(*channel_, In(kPatience), PushChecksums::kNone).ok());
  EXPECT_TRUE(empty_push.Await().status.ok());

  const auto refused = [&](auto change) {
    TestBurst burst(1, 1, kSlot);
    burst.SetPiece(0, handles_[0], 0);
    change(burst.pull(0));
    return burst.Pull(*channel_, In(kPatience)).status().code();
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(kInvalid, refused([](PullItem& item) { item.piece.length = 0; }));
  EXPECT_EQ(kInvalid, refused([](PullItem& item) { item.piece.offset = 32; }));
  EXPECT_EQ(kInvalid, refused([](PullItem& item) { item.piece.offset = 30 * kSlot; }));
  EXPECT_EQ(kInvalid, refused([](PullItem& item) { item.piece.length = kSlot * 2 + 64; }));
  EXPECT_EQ(kInvalid, refused([](PullItem& item) { item.part_bytes = 96; }));
  EXPECT_EQ(kInvalid, refused([](PullItem& item) { item.piece.reserved = 1; }));
  static const uint64_t sums[3] = {};
  EXPECT_EQ(kInvalid, refused([](PullItem& item) {
              item.checksums = sums;
              item.piece.offset = 1024;
            }));
}

TEST_P(TransportTest, Pull_DeadlineAlreadyPast_EndsAloneAndChannelLives) {
  StartHere(1);
  TestBurst late(1, 1, kSlot);
  late.SetPiece(0, handles_[0], 0);
  ASSERT_TRUE(late.Pull(*channel_, In(-absl::Seconds(1))).ok());
  EXPECT_EQ(late.Await().status.code(), absl::StatusCode::kDeadlineExceeded);
  TestBurst next(1, 1, kSlot);
  next.SetPiece(0, handles_[0], 0);
  ASSERT_TRUE(next.Pull(*channel_, In(kPatience)).ok());
  EXPECT_TRUE(next.Await().status.ok());
}

TEST_P(TransportTest, Submit_BeyondTheBound_IsResourceExhaustedThenWorksAgain) {
  StartVictim(1);
  victim_->Stop();
  std::vector<std::unique_ptr<TestBurst>> bursts;
  absl::Status refused;
  for (int i = 0; i < kChannelBurstsMax + 1 && refused.ok(); ++i) {
    auto burst = std::make_unique<TestBurst>(1, 1, kSlot);
    burst->SetPiece(0, handles_[0], 0);
    burst->FillSources(0, 0, 1);
    refused = burst->Push(*channel_, In(kPatience), PushChecksums::kNone).status();
    if (refused.ok()) bursts.push_back(std::move(burst));
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(bursts.size(), static_cast<size_t>(kChannelBurstsMax));
  victim_->Continue();
  for (const auto& burst : bursts) EXPECT_TRUE(burst->Await().status.ok());
  TestBurst again(1, 1, kSlot);
  again.SetPiece(0, handles_[0], 0);
  ASSERT_TRUE(again.Pull(*channel_, In(kPatience)).ok());
  EXPECT_TRUE(again.Await().status.ok());
}

TEST_P(TransportTest, Cancel_AnyMoment_EndsOnceAndOthersGoOn) {
  StartHere(32);
  Random random(11);
  for (int round = 0; round < 40; ++round) {
    TestBurst cancelled(64, 30, kSlot);
    TestBurst kept(8, 30, kSlot);
    const bool push = round % 2 == 1;
    for (uint32_t i = 0; i < 64; ++i) {
      cancelled.SetPiece(i, handles_[i % 32], 0);
      if (push && round > 20) cancelled.FillSources(i, i % 32, 1);
    }
    for (uint32_t i = 0; i < 8; ++i) kept.SetPiece(i, handles_[i], 0);
    const auto id = push && round > 20
                        ? cancelled.Push(*channel_, In(kPatience), PushChecksums::kCompute)
                        : cancelled.Pull(*channel_, In(kPatience));
    ASSERT_TRUE(id.ok());
    ASSERT_TRUE(kept.Pull(*channel_, In(kPatience)).ok());
    for (uint64_t spin = random.Below(1 << 18); spin > 0; --spin) __builtin_ia32_pause();
    channel_->Cancel(*id);
    const absl::Status ended = cancelled.Await().status;
    EXPECT_TRUE(ended.ok() || absl::IsCancelled(ended)) << ended;
    channel_->Cancel(*id);  // stale: nothing
    const BurstResult result = kept.Await();
    ASSERT_TRUE(result.status.ok()) << result.status;
    for (uint32_t i = 0; i < 8; ++i) ASSERT_TRUE(kept.Matches(i, i, 1));
  }
  channel_->Close();
  server_->Stop();
  EXPECT_EQ(resolver_->in_flight(), 0);
}

TEST_P(TransportTest, Close_WithBurstsInFlight_EndsThemAll) {
  StartHere(32);
  for (int round = 0; round < 10; ++round) {
    std::vector<std::unique_ptr<TestBurst>> bursts;
    for (int b = 0; b < 6; ++b) {
      bursts.push_back(std::make_unique<TestBurst>(32, 30, kSlot));
      for (uint32_t i = 0; i < 32; ++i) {
        bursts.back()->SetPiece(i, handles_[i], 0);
        if (b % 2 == 1) bursts.back()->FillSources(i, i, 1);
      }
      ASSERT_TRUE((b % 2 == 1
                       ? bursts.back()->Push(*channel_, In(kPatience), PushChecksums::kCompute)
                       : bursts.back()->Pull(*channel_, In(kPatience)))
                      .ok());
    }
    channel_->Close();
    for (const auto& burst : bursts) {
      ASSERT_TRUE(burst->done());
      const absl::Status status = burst->Await().status;
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    }
    EXPECT_FALSE(channel_->IsOpen());
    TestBurst refused(1, 30, kSlot);
    refused.SetPiece(0, handles_[0], 0);
    EXPECT_TRUE(absl::IsUnavailable(refused.Pull(*channel_, In(kPatience)).status()));
    Connect();
  }
  channel_->Close();
  server_->Stop();
  EXPECT_EQ(resolver_->in_flight(), 0);
  EXPECT_EQ(resolver_->attached(), 0);
}

TEST_P(TransportTest, Attach_WrongSecretGeometryOrNobody_IsRefused) {
  StartHere(1);
  SessionToken token = TestToken();
  token.secret[3] ^= 1;
  auto channel = transport_->Connect(server_->Address(), token, In(kPatience));
  EXPECT_TRUE(absl::IsPermissionDenied(channel.status())) << channel.status();
  token = TestToken();
  token.session = SessionId(78);
  channel = transport_->Connect(server_->Address(), token, In(kPatience));
  EXPECT_TRUE(absl::IsPermissionDenied(channel.status())) << channel.status();
  token = TestToken();
  token.geometry.layers = 16;
  channel = transport_->Connect(server_->Address(), token, In(kPatience));
  EXPECT_TRUE(absl::IsFailedPrecondition(channel.status())) << channel.status();
  EXPECT_NE(channel.status().message().find("L16 H3 D64"), std::string::npos);
  EXPECT_NE(channel.status().message().find("L30 H3 D64"), std::string::npos);
  EXPECT_EQ(server_->Stats().attaches_refused, 3u);
  // The attached channel is none the worse.
  TestBurst burst(1, 30, kSlot);
  burst.SetPiece(0, handles_[0], 0);
  ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
  EXPECT_TRUE(burst.Await().status.ok());

  const std::string address = server_->Address();
  channel_.reset();
  server_->Stop();
  channel = transport_->Connect(address, TestToken(), In(absl::Seconds(5)));
  EXPECT_TRUE(absl::IsUnavailable(channel.status())) << channel.status();
  channel = transport_->Connect("nonsense", TestToken(), In(absl::Seconds(5)));
  EXPECT_FALSE(channel.ok());
}

TEST_P(TransportTest, Idle_ServerAndChannel_SleepInsteadOfSpinning) {
  StartHere(1);
  TestBurst burst(1, 1, kSlot);
  burst.SetPiece(0, handles_[0], 0);
  ASSERT_TRUE(burst.Pull(*channel_, In(kPatience)).ok());
  EXPECT_TRUE(burst.Await().status.ok());
  const auto cpu = [] {
    timespec ts{};
    EXPECT_EQ(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts), 0);
    return absl::DurationFromTimespec(ts);
  };
  const auto switches = [] {
    rusage usage{};
    EXPECT_EQ(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_nvcsw;
  };
  const absl::Duration before = cpu();
  const long switches_before = switches();
  Mutex mu;
  CondVar never;
  MutexLock lock(mu);
  (void)never.WaitFor(mu, absl::Milliseconds(500));
  // A thread that spins takes most of the time; one that polls with a timer switches often.
  EXPECT_LT(cpu() - before, absl::Milliseconds(50));
  EXPECT_LT(switches() - switches_before, 50);
}

TEST_P(TransportTest, Callback_SubmitsTheNextBurst_Chain) {
  StartHere(4);
  // 100 bursts, each submitted by the callback of the one before.
  struct Chain {
    Channel* channel;
    std::vector<PullItem> items;
    std::vector<std::byte*> parts;
    std::vector<PieceStatus> statuses;
    std::atomic<int> left{100};
    Mutex mu;
    CondVar changed;
    void Next() {
      PullRequest request;
      request.items = items;
      request.statuses = absl::MakeSpan(statuses);
      request.deadline = In(kPatience);
      request.done = [this](const BurstResult& result) {
        if (!result.status.ok() || result.pieces_ok != 1) left = -1;
        if (left > 0 && --left > 0) return Next();
        MutexLock lock(mu);
        changed.NotifyAll();
      };
      if (!channel->Pull(std::move(request)).ok()) left = -1;
    }
  };
  Chain chain;
  chain.channel = channel_.get();
  TestBurst memory(1, 1, kSlot);
  memory.SetPiece(0, handles_[1], 0);
  chain.items.push_back(memory.pull(0));
  chain.statuses.resize(1);
  chain.Next();
  const absl::Time end = In(kPatience);
  MutexLock lock(chain.mu);
  while (chain.left > 0 && RealClock::Get().Now() < end) {
    chain.changed.WaitFor(chain.mu, absl::Milliseconds(100));
  }
  EXPECT_EQ(chain.left, 0);
}

}  // namespace
}  // namespace kvt
