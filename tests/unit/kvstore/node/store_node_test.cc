// The node by itself: what it refuses, and the data plane's calls in the order a transport makes
// them.
#include "kvstore/node/store_node.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/support/store_testing.h"

namespace kvt {
namespace {

using absl::StatusCode;

class StoreNodeTest : public testing::Test {
 protected:
  StoreNodeTest() : store_(8, clock_) {}
  StoreNode& node() { return store_.node(); }

  SessionId Open(const std::string& worker = "w") {
    const auto reply = node().OpenSession(TestOpen(worker));
    EXPECT_TRUE(reply.ok()) << reply.status();
    secret_ = reply->secret;
    return reply->session;
  }
  SignedTicket Grant(uint64_t id, uint32_t epoch = 1) { return store_.tickets().Make(id, epoch); }

  Piece PieceOf(uint64_t ticket, uint64_t handle, Plane plane, uint32_t offset = 0,
                uint32_t length = TestGeometry().RecordBytes()) {
    Piece piece;
    piece.ticket = ticket;
    piece.ticket_epoch = 1;
    piece.handle = PlaneRecordHandle(handle, plane);
    piece.offset = offset;
    piece.length = length;
    return piece;
  }
  // As a transport does: resolve, copy, commit.
  PieceStatus Push(SessionId session, const Piece& piece, const BlockKey& key,
                   bool checksums = true) {
    ResolvedPush to;
    node().ResolvePush(session, {&piece, 1}, {&to, 1});
    if (to.status != PieceStatus::kOk) return to.status;
    EXPECT_EQ(to.key_hash, key.Hash64());
    const std::vector<std::byte> bytes = TestBytes(key, to.plane);
    std::memcpy(to.data, &bytes[piece.offset], piece.length);
    const std::vector<uint64_t> sums = TestChecksums(key, to.plane);
    const uint32_t slice = TestGeometry().SliceBytes();
    PushedPiece pushed;
    pushed.piece = piece;
    pushed.status = PieceStatus::kOk;
    if (checksums) {
      pushed.checksums =
          absl::MakeConstSpan(sums).subspan(piece.offset / slice, piece.length / slice);
    }
    PieceStatus verdict = PieceStatus::kOk;
    node().CommitPush(session, {&pushed, 1}, {&verdict, 1});
    return verdict;
  }
  // Reserves and pushes the first block of seed.
  uint64_t Store(SessionId session, uint64_t ticket, int seed, bool checksums = true) {
    const auto names = TestNames(1, seed);
    const auto reserved = node().Reserve({session, Grant(ticket), names, 0});
    EXPECT_TRUE(reserved.ok()) << reserved.status();
    const uint64_t handle = reserved->blocks[0].place.handle;
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      EXPECT_EQ(Push(session, PieceOf(ticket, handle, plane), names[0].key, checksums),
                PieceStatus::kOk);
    }
    return handle;
  }

  ManualClock clock_;
  StoreUnderTest store_;
  std::string secret_;
};

TEST_F(StoreNodeTest, TicketOfAnotherSigner_IsUnauthenticated) {
  const SessionId session = Open();
  const TicketMaker other;
  EXPECT_EQ(node().Lookup({session, other.Make(1), TestNames(1, 1)}).status().code(),
            StatusCode::kUnauthenticated);
  SignedTicket forged = Grant(1);
  forged.payload.back() = static_cast<char>(forged.payload.back() ^ 1);
  EXPECT_EQ(node().Reserve({session, forged, TestNames(1, 1), 0}).status().code(),
            StatusCode::kUnauthenticated);
  // A checked signature does not vouch for another payload.
  ASSERT_TRUE(node().Lookup({session, Grant(1), TestNames(1, 1)}).ok());
  EXPECT_EQ(node().Lookup({session, forged, TestNames(1, 1)}).status().code(),
            StatusCode::kUnauthenticated);
  EXPECT_EQ(node().Lookup({session, SignedTicket(), {}}).status().code(),
            StatusCode::kUnauthenticated);
}

TEST_F(StoreNodeTest, KeyOfTheCoordinatorsNextBoot_IsTakenBesideTheOld) {
  const SessionId session = Open();
  const TicketMaker next;
  EXPECT_EQ(node().AddTicketKey("short").code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(node().AddTicketKey(next.PublicKey()).ok());
  EXPECT_TRUE(node().Lookup({session, next.Make(1), TestNames(1, 1)}).ok());
  EXPECT_TRUE(node().Lookup({session, Grant(2), TestNames(1, 1)}).ok());
}

TEST_F(StoreNodeTest, TicketForAnotherModel_IsRefusedNamingBoth) {
  const SessionId session = Open();
  Ticket ticket;
  ticket.id = TicketId(1);
  ticket.model_fingerprint = "f2";
  ticket.numerics_id = kTestNumerics;
  const auto reply = node().Lookup({session, store_.tickets().Sign(ticket), TestNames(1, 1)});
  ASSERT_EQ(reply.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(reply.status().message().find("f1"), absl::string_view::npos);
  EXPECT_NE(reply.status().message().find("f2"), absl::string_view::npos);
}

TEST_F(StoreNodeTest, WireVersionsThatDoNotMeet_AreRefusedNamingBoth) {
  OpenSessionRequest request = TestOpen("w");
  request.versions = {kWireVersion + 1, kWireVersion + 2};
  const auto reply = node().OpenSession(request);
  ASSERT_EQ(reply.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(reply.status().message().find(
                absl::StrCat("speaks ", kWireVersion + 1, " to ", kWireVersion + 2)),
            absl::string_view::npos)
      << reply.status();
}

TEST_F(StoreNodeTest, Attach_ChecksSessionSecretAndGeometry) {
  const SessionId session = Open();
  SessionToken token;
  token.session = session;
  token.geometry = TestGeometry();
  EXPECT_EQ(node().Attach(token).code(), StatusCode::kPermissionDenied);  // no secret
  std::memcpy(token.secret.data(), secret_.data(), token.secret.size());
  token.geometry.layers = 5;
  const absl::Status geometry = node().Attach(token);
  EXPECT_EQ(geometry.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(geometry.message().find("L5 H2 D32"), absl::string_view::npos) << geometry;
  EXPECT_NE(geometry.message().find("L3 H2 D32"), absl::string_view::npos) << geometry;
  token.geometry = TestGeometry();
  for (int i = 0; i < kSessionChannelsMax; ++i) ASSERT_TRUE(node().Attach(token).ok());
  EXPECT_EQ(node().Attach(token).code(), StatusCode::kResourceExhausted);
  node().Detach(session);
  EXPECT_TRUE(node().Attach(token).ok());
  token.session = SessionId(12345);
  EXPECT_EQ(node().Attach(token).code(), StatusCode::kPermissionDenied);
}

TEST_F(StoreNodeTest, Draining_RefusesNewWorkAndLetsOldWorkEnd) {
  const SessionId session = Open();
  Store(session, 1, 1);
  const auto reserved = node().Reserve({session, Grant(1), TestNames(1, 5000), 0});
  ASSERT_TRUE(reserved.ok());
  node().SetDraining(true);
  EXPECT_EQ(node().OpenSession(TestOpen("x")).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(node().Lookup({session, Grant(2), TestNames(1, 1)}).status().code(),
            StatusCode::kUnavailable);
  EXPECT_EQ(node().Reserve({session, Grant(2), TestNames(1, 1), 0}).status().code(),
            StatusCode::kUnavailable);
  EXPECT_TRUE(node().Renew({session, {Ref(1)}}).ok());
  const uint64_t handle = reserved->blocks[0].place.handle;
  const BlockKey key = TestNames(1, 5000)[0].key;
  EXPECT_EQ(Push(session, PieceOf(1, handle, Plane::kBase), key), PieceStatus::kOk);
  EXPECT_TRUE(node().Seal({session, Ref(1), {handle}}).ok());
  EXPECT_TRUE(node().Release({session, Ref(1)}).ok());
  EXPECT_TRUE(node().CloseSession(session).ok());
}

TEST_F(StoreNodeTest, MalformedPieces_AreInvalid) {
  const SessionId session = Open();
  const uint64_t handle = Store(session, 1, 1);
  std::vector<Piece> pieces = {
      PieceOf(1, handle, Plane::kBase, 32, 64), PieceOf(1, handle, Plane::kBase, 0, 96),
      PieceOf(1, handle, Plane::kBase, 0, 0), PieceOf(1, handle, Plane::kBase, 64),
      PieceOf(1, handle, Plane::kBase)};
  pieces.back().reserved = 1;
  std::vector<ResolvedPull> pulls(pieces.size());
  node().ResolvePull(session, pieces, absl::MakeSpan(pulls));
  for (size_t i = 0; i < pulls.size(); ++i) {
    EXPECT_EQ(pulls[i].status, PieceStatus::kInvalid) << i;
    EXPECT_EQ(pulls[i].data, nullptr) << i;
  }
  EXPECT_TRUE(node().IsQuiet());
}

TEST_F(StoreNodeTest, StoredBlock_IsFoundWithItsChecksumsAndBytes) {
  const SessionId session = Open();
  const uint64_t handle = Store(session, 1, 1);
  const auto names = TestNames(2, 1);
  const auto reply = node().Lookup({session, Grant(2), names});
  ASSERT_TRUE(reply.ok());
  ASSERT_EQ(reply->blocks.size(), 2u);
  EXPECT_EQ(reply->blocks[1].presence, BlockPresence::kAbsent);
  const BlockPlace& place = reply->blocks[0].place;
  ASSERT_EQ(reply->blocks[0].presence, BlockPresence::kExact);
  EXPECT_EQ(place.handle, handle);
  EXPECT_EQ(place.base_checksums, TestChecksums(names[0].key, Plane::kBase));
  EXPECT_EQ(place.residual_checksums, TestChecksums(names[0].key, Plane::kResidual));
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    const Piece piece = PieceOf(2, handle, plane);
    ResolvedPull pull;
    node().ResolvePull(session, {&piece, 1}, {&pull, 1});
    ASSERT_EQ(pull.status, PieceStatus::kOk);
    EXPECT_FALSE(node().IsQuiet());
    const std::vector<std::byte> bytes = TestBytes(names[0].key, plane);
    EXPECT_EQ(std::memcmp(pull.data, bytes.data(), bytes.size()), 0);
    node().ReleasePull(session, {&piece, 1});
    // The record table, which same-host readers use, says the same.
    const auto offset = store_.arena().table().Find(PlaneRecordHandle(handle, plane));
    ASSERT_TRUE(offset.has_value());
    EXPECT_EQ(store_.arena().data() + *offset, pull.data);
  }
  EXPECT_TRUE(node().IsQuiet());
  const StoreStats stats = node().StatsNow();
  EXPECT_EQ(stats.pushed_bytes, 2 * TestGeometry().RecordBytes());
  EXPECT_EQ(stats.pulled_bytes, 2 * TestGeometry().RecordBytes());
  EXPECT_EQ(stats.lookup_blocks, 2u);
  EXPECT_EQ(stats.hit_blocks, 1u);
}

TEST_F(StoreNodeTest, BlockPushedWithoutChecksums_HasNone) {
  const SessionId session = Open();
  Store(session, 1, 1, /*checksums=*/false);
  const auto reply = node().Lookup({session, Grant(2), TestNames(1, 1)});
  ASSERT_TRUE(reply.ok());
  ASSERT_EQ(reply->blocks[0].presence, BlockPresence::kExact);
  EXPECT_TRUE(reply->blocks[0].place.base_checksums.empty());
  EXPECT_TRUE(reply->blocks[0].place.residual_checksums.empty());
}

TEST_F(StoreNodeTest, CorruptPush_IsCountedAndTheBlockStaysInvisible) {  // F6
  const SessionId session = Open();
  const auto names = TestNames(1, 1);
  const auto reserved = node().Reserve({session, Grant(1), names, 0});
  const uint64_t handle = reserved->blocks[0].place.handle;
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    PushedPiece pushed;
    pushed.piece = PieceOf(1, handle, plane);
    pushed.status = PieceStatus::kCorrupt;
    ResolvedPush to;
    node().ResolvePush(session, {&pushed.piece, 1}, {&to, 1});
    ASSERT_EQ(to.status, PieceStatus::kOk);
    PieceStatus verdict = PieceStatus::kOk;
    node().CommitPush(session, {&pushed, 1}, {&verdict, 1});
    EXPECT_EQ(verdict, PieceStatus::kCorrupt);
  }
  EXPECT_EQ(node().StatsNow().checksum_failures, 2u);
  EXPECT_EQ(node().StatsNow().pushed_bytes, 0u);
  const auto found = node().Lookup({session, Grant(2), names});
  EXPECT_EQ(found->blocks[0].presence, BlockPresence::kAbsent);
  const auto outcome = node().Seal({session, Ref(1), {handle}});
  EXPECT_EQ(outcome->blocks[0].outcome, SealReply::Outcome::kIncomplete);
}

TEST_F(StoreNodeTest, ReservationThatWentDuringAPush_IsLost) {
  const SessionId session = Open();
  const auto reserved = node().Reserve({session, Grant(1), TestNames(1, 1), 0});
  PushedPiece pushed;
  pushed.piece = PieceOf(1, reserved->blocks[0].place.handle, Plane::kBase);
  pushed.status = PieceStatus::kOk;
  ResolvedPush to;
  node().ResolvePush(session, {&pushed.piece, 1}, {&to, 1});
  ASSERT_EQ(to.status, PieceStatus::kOk);
  ASSERT_TRUE(node().Release({session, Ref(1)}).ok());
  PieceStatus verdict = PieceStatus::kOk;
  node().CommitPush(session, {&pushed, 1}, {&verdict, 1});
  EXPECT_EQ(verdict, PieceStatus::kLost);
  EXPECT_EQ(node().StatsNow().used_bytes, 0u);
}

TEST_F(StoreNodeTest, LeaseEnds_ReadIsRefusedAndMemoryIsReusedOnlyAfterTheLastSend) {  // F1
  const SessionId session = Open();
  std::vector<uint64_t> handles;
  for (int i = 0; i < 8; ++i) handles.push_back(Store(session, 1, 1000 * (i + 1)));
  const Piece piece = PieceOf(1, handles[3], Plane::kResidual);
  ResolvedPull pull;
  node().ResolvePull(session, {&piece, 1}, {&pull, 1});
  ASSERT_EQ(pull.status, PieceStatus::kOk);
  for (int i = 0; i < 110; ++i) {
    clock_.Advance(kStoreTick);
    node().Tick();
  }
  EXPECT_EQ(node().StatsNow().sessions, 0u);
  EXPECT_EQ(node().StatsNow().pins, 0u);
  EXPECT_EQ(node().StatsNow().lapsed_leases, 1u);
  ResolvedPull late;
  node().ResolvePull(session, {&piece, 1}, {&late, 1});
  EXPECT_EQ(late.status, PieceStatus::kExpired);
  EXPECT_EQ(node().Renew({session, {}}).status().code(), StatusCode::kNotFound);
  // Others take every other block; the one under the send stays as it is.
  const SessionId other = Open("other");
  for (int i = 0; i < 7; ++i) Store(other, 2, 100000 + 1000 * i);
  EXPECT_EQ(node().Reserve({other, Grant(3), TestNames(1, 7), 0}).status().code(),
            StatusCode::kResourceExhausted);
  const std::vector<std::byte> bytes = TestBytes(TestNames(1, 4000)[0].key, Plane::kResidual);
  EXPECT_EQ(std::memcmp(pull.data, bytes.data(), bytes.size()), 0);
  node().ReleasePull(session, {&piece, 1});
  EXPECT_TRUE(node().Reserve({other, Grant(3), TestNames(1, 7), 0}).ok());
  EXPECT_FALSE(store_.arena().table().Find(PlaneRecordHandle(handles[3], Plane::kResidual)));
}

TEST_F(StoreNodeTest, StoreThatWasStopped_KeepsItsLeases) {
  const SessionId session = Open();
  Store(session, 1, 1);
  clock_.Advance(absl::Seconds(60));  // as after SIGSTOP
  EXPECT_TRUE(node().Renew({session, {Ref(1)}}).ok());
  node().Tick();
  EXPECT_EQ(node().StatsNow().pins, 1u);
}

TEST_F(StoreNodeTest, NodeWithoutKey_IsUnavailable) {
  StoreNodeConfig config;
  config.slab_bytes = 4 * TestGeometry().RecordBytes();
  config.blocks_max = 16;
  auto arena = Arena::Create(config.slab_bytes, 32);
  ASSERT_TRUE(arena.ok());
  StoreNode fresh(config, *arena, clock_);
  const auto session = fresh.OpenSession(TestOpen("w"));
  ASSERT_TRUE(session.ok());
  EXPECT_EQ(fresh.Lookup({session->session, Grant(1), {}}).status().code(),
            StatusCode::kUnavailable);
}

}  // namespace
}  // namespace kvt
