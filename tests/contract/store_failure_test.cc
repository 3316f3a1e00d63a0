// What a store keeps to when the holders of its pins die, lag, are fenced or hand over, and when it
// stalls itself (DESIGN 3, FIELD-CASES F1, F4). The data plane is played call by call, so that every
// order can be had.
#include <gtest/gtest.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/random.h"
#include "tests/support/store_testing.h"

namespace kvt {
namespace {

constexpr int kBlocks = 40;
constexpr absl::Duration kLease = absl::Seconds(10);

class StoreFailureTest : public testing::Test {
 protected:
  StoreFailureTest() : store_(kBlocks, clock_, kLease) {}
  StoreNode& node() { return store_.node(); }
  SessionId Open(const std::string& worker, uint64_t boot = 1) {
    const auto reply = node().OpenSession(TestOpen(worker, boot));
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? reply->session : SessionId();
  }
  SignedTicket Grant(uint64_t id, uint32_t epoch = 1) {
    return store_.tickets().Make(id, epoch);
  }
  // Time goes by as a running store sees it: tick by tick.
  void Pass(absl::Duration time) {
    for (; time > absl::ZeroDuration(); time -= absl::Milliseconds(500)) {
      clock_.Advance(std::min(time, absl::Milliseconds(500)));
      node().Tick();
    }
  }

  static Piece PieceOf(uint64_t ticket, uint32_t epoch, uint64_t handle, Plane plane) {
    Piece piece;
    piece.ticket = ticket;
    piece.ticket_epoch = epoch;
    piece.handle = PlaneRecordHandle(handle, plane);
    piece.length = TestGeometry().RecordBytes();
    return piece;
  }
  ResolvedPush BeginPush(SessionId session, const Piece& piece) {
    ResolvedPush to;
    node().ResolvePush(session, {&piece, 1}, {&to, 1});
    return to;
  }
  PieceStatus EndPush(SessionId session, const Piece& piece, const ResolvedPush& to,
                      const BlockKey& key) {
    const std::vector<std::byte> bytes = TestBytes(key, to.plane);
    std::memcpy(to.data, bytes.data(), bytes.size());
    const std::vector<uint64_t> sums = TestChecksums(key, to.plane);
    const PushedPiece pushed{piece, PieceStatus::kOk, sums};
    PieceStatus verdict = PieceStatus::kOk;
    node().CommitPush(session, {&pushed, 1}, {&verdict, 1});
    return verdict;
  }
  PieceStatus Push(SessionId session, const Piece& piece, const BlockKey& key) {
    const ResolvedPush to = BeginPush(session, piece);
    return to.status == PieceStatus::kOk ? EndPush(session, piece, to, key) : to.status;
  }
  // Reserves and writes whatever of the names is not there; false when there is no room.
  bool Store(SessionId session, uint64_t ticket, const std::vector<BlockName>& names) {
    const auto reserved = node().Reserve({session, Grant(ticket), names, 0, {}});
    if (!reserved.ok()) return false;
    for (size_t i = 0; i < names.size(); ++i) {
      if (reserved->blocks[i].already_sealed) continue;
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        EXPECT_EQ(Push(session, PieceOf(ticket, 1, reserved->blocks[i].place.handle, plane),
                       names[i].key),
                  PieceStatus::kOk);
      }
    }
    return true;
  }
  ResolvedPull Pull(SessionId session, const Piece& piece) {
    ResolvedPull from;
    node().ResolvePull(session, {&piece, 1}, {&from, 1});
    return from;
  }
  static bool Holds(const std::byte* data, const BlockKey& key, Plane plane) {
    const std::vector<std::byte> bytes = TestBytes(key, plane);
    return std::memcmp(data, bytes.data(), bytes.size()) == 0;
  }
  // Writes blocks of others until everything that can be evicted has been.
  void EvictAllThatIsFree(SessionId session, uint64_t first_ticket) {
    const uint64_t before = node().StatsNow().evicted_blocks;
    for (int round = 0; round < kBlocks; ++round) {
      const uint64_t ticket = first_ticket + static_cast<uint64_t>(round);
      (void)Store(session, ticket, TestNames(2, 1'000'000 + 1000 * static_cast<int>(ticket)));
      EXPECT_TRUE(node().Release({session, Ref(ticket)}).ok());
    }
    EXPECT_GT(node().StatsNow().evicted_blocks, before);
  }
  void ExpectNothingHeld() {
    const StoreStats stats = node().StatsNow();
    EXPECT_EQ(stats.pins, 0u);
    EXPECT_EQ(stats.pinned_blocks, 0u);
    EXPECT_EQ(stats.in_flight, 0u);
    EXPECT_EQ(stats.tickets, 0u);
    EXPECT_EQ(stats.output_reserved_blocks, 0u);
    EXPECT_EQ(stats.reserved_bytes + stats.writing_bytes + stats.evicting_bytes, 0u);
    EXPECT_EQ(stats.used_bytes, stats.blocks * 2 * TestGeometry().RecordBytes());
  }

  ManualClock clock_;
  StoreUnderTest store_;
};

// A read that runs when the lease ends keeps its memory until it is complete; the next one is told.
TEST_F(StoreFailureTest, F1_LeaseEndsUnderARead_MemoryStaysUntilItsEndAndTheNextIsExpired) {
  const SessionId reader = Open("decode");
  const SessionId writer = Open("prefill");
  const auto names = TestNames(1, 1);
  ASSERT_TRUE(Store(writer, 1, names));
  const auto found = node().Lookup({reader, Grant(1), names});
  ASSERT_TRUE(found.ok());
  ASSERT_TRUE(node().Release({writer, Ref(1)}).ok());
  const Piece piece = PieceOf(1, 1, found->blocks[0].place.handle, Plane::kBase);
  const ResolvedPull running = Pull(reader, piece);
  ASSERT_EQ(running.status, PieceStatus::kOk);
  for (int i = 0; i < 4; ++i) {
    Pass(kLease / 3);
    ASSERT_TRUE(node().Renew({writer, {}}).ok());
  }
  ASSERT_EQ(node().StatsNow().lapsed_leases, 1u);
  EvictAllThatIsFree(writer, 100);
  EXPECT_TRUE(Holds(running.data, names[0].key, Plane::kBase));
  EXPECT_EQ(node().StatsNow().in_flight, 1u);
  const ResolvedPull late = Pull(reader, piece);
  EXPECT_EQ(late.status, PieceStatus::kExpired) << PieceStatusName(late.status);
  EXPECT_EQ(late.data, nullptr);
  // Writes of the session are told, too.
  EXPECT_EQ(BeginPush(reader, piece).status, PieceStatus::kExpired);
  node().ReleasePull(reader, {&piece, 1});
  EvictAllThatIsFree(writer, 500);
  EXPECT_FALSE(Holds(running.data, names[0].key, Plane::kBase));
  ExpectNothingHeld();
}

TEST_F(StoreFailureTest, F1_HandOver_DecodePinsBeforePrefillLetsGoAndNothingIsEvictedBetween) {
  const SessionId prefill = Open("prefill");
  const SessionId decode = Open("decode");
  const SessionId others = Open("others");
  for (uint64_t ticket = 1; ticket <= 20; ++ticket) {
    auto names = TestNames(4, 1000 * static_cast<int>(ticket));
    names.back().ticket_private = true;  // the tail
    ASSERT_TRUE(Store(prefill, ticket, names));
    EvictAllThatIsFree(others, 1000 * ticket);
    const auto found = node().Lookup({decode, Grant(ticket), names});
    ASSERT_TRUE(found.ok());
    ASSERT_TRUE(node().Release({prefill, Ref(ticket)}).ok());
    EvictAllThatIsFree(others, 1000 * ticket + 500);
    for (size_t i = 0; i < names.size(); ++i) {
      ASSERT_EQ(found->blocks[i].presence, BlockPresence::kExact) << i;
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        const Piece piece = PieceOf(ticket, 1, found->blocks[i].place.handle, plane);
        const ResolvedPull read = Pull(decode, piece);
        ASSERT_EQ(read.status, PieceStatus::kOk) << PieceStatusName(read.status);
        EXPECT_TRUE(Holds(read.data, names[i].key, plane));
        node().ReleasePull(decode, {&piece, 1});
      }
    }
    ASSERT_TRUE(node().Release({decode, Ref(ticket)}).ok());
  }
  ExpectNothingHeld();
}

// The pin of one session is no other's: a handle that leaked gives nothing.
TEST_F(StoreFailureTest, Pull_NeedsAPinOfThatTicketInThatSession) {
  const SessionId reader = Open("decode");
  const SessionId stranger = Open("stranger");
  const auto names = TestNames(2, 1);
  ASSERT_TRUE(Store(reader, 1, names));
  ASSERT_TRUE(Store(stranger, 2, TestNames(1, 5000)));
  const auto found = node().Lookup({reader, Grant(1), names});
  ASSERT_TRUE(found.ok());
  const uint64_t handle = found->blocks[0].place.handle;
  EXPECT_EQ(Pull(stranger, PieceOf(1, 1, handle, Plane::kBase)).status, PieceStatus::kRefused);
  EXPECT_EQ(Pull(stranger, PieceOf(2, 1, handle, Plane::kBase)).status, PieceStatus::kRefused);
  EXPECT_EQ(Pull(reader, PieceOf(2, 1, handle, Plane::kBase)).status, PieceStatus::kRefused);
  EXPECT_EQ(Pull(reader, PieceOf(1, 2, handle, Plane::kBase)).status, PieceStatus::kRefused);
  EXPECT_EQ(Pull(SessionId(4711), PieceOf(1, 1, handle, Plane::kBase)).status,
            PieceStatus::kExpired);
}

TEST_F(StoreFailureTest, HigherEpoch_FencesTheLowerAndItsRunningWriteKeepsItsMemory) {
  const SessionId old_worker = Open("decode-0");
  const SessionId new_worker = Open("decode-1");
  const auto names = TestNames(1, 1);
  const auto reserved = node().Reserve({old_worker, Grant(7, 1), names, 3, {}});
  ASSERT_TRUE(reserved.ok());
  const Piece piece = PieceOf(7, 1, reserved->blocks[0].place.handle, Plane::kBase);
  const ResolvedPush running = BeginPush(old_worker, piece);
  ASSERT_EQ(running.status, PieceStatus::kOk);
  // The ticket was granted again, to another worker.
  ASSERT_TRUE(node().Lookup({new_worker, Grant(7, 2), names}).ok());
  EXPECT_EQ(BeginPush(old_worker, PieceOf(7, 1, reserved->blocks[0].place.handle, Plane::kResidual))
                .status,
            PieceStatus::kRefused);
  EXPECT_TRUE(absl::IsFailedPrecondition(
      node().Reserve({old_worker, Grant(7, 1), TestNames(1, 900), 0, {}}).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(node().Lookup({old_worker, Grant(7, 1), names}).status()));
  // What the fenced one still writes belongs to nobody else until it ends, and is then lost.
  EXPECT_GT(node().StatsNow().evicting_bytes, 0u);
  EvictAllThatIsFree(new_worker, 100);
  std::memset(running.data, 0x5a, TestGeometry().RecordBytes());
  const auto others = node().Lookup({new_worker, Grant(900), TestNames(2, 1'100'000)});
  ASSERT_TRUE(others.ok());
  for (const LookupReply::Block& block : others->blocks) {
    if (block.presence == BlockPresence::kAbsent) continue;
    EXPECT_NE(store_.arena().data() + block.place.base_offset, running.data);
  }
  EXPECT_EQ(EndPush(old_worker, piece, running, names[0].key), PieceStatus::kLost);
  EXPECT_EQ(node().StatsNow().evicting_bytes, 0u);
  EXPECT_EQ(node().Lookup({new_worker, Grant(7, 2), names})->blocks[0].presence,
            BlockPresence::kAbsent);
  // The old worker's renewals keep nothing of the old epoch alive.
  ASSERT_TRUE(node().Renew({old_worker, {Ref(7, 1)}}).ok());
  ASSERT_TRUE(node().Release({new_worker, Ref(7, 2)}).ok());
  ASSERT_TRUE(node().Release({new_worker, Ref(900)}).ok());
  ExpectNothingHeld();
}

// The store was stopped for longer than a lease: nobody could renew, so nobody loses anything.
TEST_F(StoreFailureTest, StoreThatStalled_ExtendsEveryLeaseByTheStall) {
  const SessionId worker = Open("decode");
  const auto names = TestNames(3, 1);
  ASSERT_TRUE(Store(worker, 1, names));
  Pass(kLease / 2);
  clock_.Advance(10 * kLease);  // SIGSTOP, a suspended machine
  node().Tick();
  EXPECT_EQ(node().StatsNow().pins, 3u);
  Pass(kLease / 4);
  ASSERT_TRUE(node().Renew({worker, {Ref(1)}}).ok());
  EXPECT_EQ(node().StatsNow().pins, 3u);
  // A worker that is silent after the stall loses its lease as ever.
  Pass(kLease + absl::Seconds(1));
  EXPECT_EQ(node().StatsNow().lapsed_leases, 1u);
  ExpectNothingHeld();
}

TEST_F(StoreFailureTest, F3_AnnouncedAndNeverWritten_StaysInvisibleAndGoesWithTheLease) {
  const SessionId writer = Open("prefill");
  const SessionId reader = Open("decode");
  const auto names = TestNames(6, 1);
  const auto reserved = node().Reserve({writer, Grant(1), names, 2, {}});
  ASSERT_TRUE(reserved.ok());
  SealRequest seal{writer, Ref(1), {}};
  for (size_t i = 0; i < names.size(); ++i) {
    const uint64_t handle = reserved->blocks[i].place.handle;
    seal.handles.push_back(handle);
    // One plane of some, nothing of the others, both of the first.
    if (i < 3) {
      EXPECT_EQ(Push(writer, PieceOf(1, 1, handle, Plane::kBase), names[i].key), PieceStatus::kOk);
    }
    if (i < 1) {
      EXPECT_EQ(Push(writer, PieceOf(1, 1, handle, Plane::kResidual), names[i].key),
                PieceStatus::kOk);
    }
  }
  const auto sealed = node().Seal(seal);
  ASSERT_TRUE(sealed.ok());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(sealed->blocks[i].outcome, i == 0 ? SealReply::Outcome::kSealed
                                                : SealReply::Outcome::kIncomplete);
  }
  const auto found = node().Lookup({reader, Grant(1), names});
  ASSERT_TRUE(found.ok());
  for (size_t i = 1; i < names.size(); ++i) {
    EXPECT_EQ(found->blocks[i].presence, BlockPresence::kAbsent) << i;
  }
  Pass(kLease + absl::Seconds(1));
  ExpectNothingHeld();
  EXPECT_EQ(node().StatsNow().blocks, 1u);
}

// 100,000 requests that end in every way between lookup and read.
TEST_F(StoreFailureTest, F4_LookupsThatAreNeverRead_PinsAndOccupancyReturnToZeroWithinALease) {
  constexpr int kRequests = 100'000;
  constexpr int kTickets = 400;
  const uint64_t seed = Random::FromEntropy().Next();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  Random random(seed);
  std::vector<SignedTicket> grants;
  for (int i = 0; i < 2 * kTickets; ++i) grants.push_back(Grant(1 + i / 2, 1 + i % 2));
  std::vector<std::vector<BlockName>> prefixes;
  for (int i = 0; i < 8; ++i) prefixes.push_back(TestNames(5, 10'000 * (i + 1)));
  uint64_t boot = 1;
  SessionId session = Open("decode", boot);
  const SessionId writer = Open("prefill");
  for (size_t i = 0; i < 4; ++i) ASSERT_TRUE(Store(writer, 5000 + i, prefixes[i]));
  ASSERT_TRUE(node().Renew({writer, {}}).ok());
  uint64_t pinned = 0;
  int refused = 0;
  for (int i = 0; i < kRequests; ++i) {
    const size_t t = random.Below(kTickets);
    const SignedTicket& grant = grants[2 * t + random.Below(2)];
    const TicketRef one = Ref(t + 1, 1);
    const auto& names = prefixes[random.Below(prefixes.size())];
    (void)node().Lookup({session, grant, names});  // a fenced epoch is refused
    const auto reserved =
        node().Reserve({session, grant, names, static_cast<uint32_t>(random.Below(3)), {}});
    refused += absl::IsResourceExhausted(reserved.status());
    pinned = std::max(pinned, node().StatsNow().pins);
    switch (random.Below(8)) {
      case 0:  // cancelled
        ASSERT_TRUE(node().Release({session, one}).ok());
        ASSERT_TRUE(node().Release({session, Ref(t + 1, 2)}).ok());
        break;
      case 1:  // the worker forgot it
        ASSERT_TRUE(node().Renew({session, {}}).ok());
        break;
      case 2:  // only some are alive
        ASSERT_TRUE(node().Renew({session, {one}}).ok());
        break;
      default:  // never heard of again
        break;
    }
    if (i % 5000 == 4999) session = Open("decode", ++boot);  // the worker crashed and came back
    if (i % 500 == 499) {
      Pass(absl::Seconds(1));
      ASSERT_TRUE(node().Renew({writer, {}}).ok());
    }
    if (i % 20'000 == 19'999) {
      // Silence for a lease: everything is back.
      for (int k = 0; k < 4; ++k) {
        Pass(kLease / 3);
        ASSERT_TRUE(node().Renew({writer, {}}).ok());
      }
      ExpectNothingHeld();
      session = Open("decode", ++boot);
    }
  }
  EXPECT_GT(pinned, 0u);
  EXPECT_GT(refused, 100);
  Pass(kLease + absl::Seconds(1));
  ExpectNothingHeld();
  EXPECT_EQ(node().StatsNow().sessions, 0u);
}

}  // namespace
}  // namespace kvt
