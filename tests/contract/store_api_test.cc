// StoreApi's contract, of the node called directly and through gRPC: what goes in comes out, errors
// keep their code and text.
#include <gtest/gtest.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/support/store_testing.h"

namespace kvt {
namespace {

using absl::StatusCode;

enum class Way { kDirect, kGrpc };

class StoreApiTest : public testing::TestWithParam<Way> {
 protected:
  StoreApiTest() : store_(16) {
    if (GetParam() == Way::kDirect) return;
    auto server = ServeStore(store_.node(), "127.0.0.1:0");
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = ConnectStore(absl::StrCat("127.0.0.1:", server_->port()), absl::Seconds(20));
  }
  StoreApi& api() { return stub_ != nullptr ? *stub_ : store_.node(); }

  // Pushes both planes of a reserved block, as a data plane would.
  void Write(SessionId session, uint64_t ticket, const BlockName& name, uint64_t handle) {
    for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
      PushedPiece pushed;
      pushed.piece.ticket = ticket;
      pushed.piece.ticket_epoch = 1;
      pushed.piece.handle = PlaneRecordHandle(handle, plane);
      pushed.piece.length = TestGeometry().RecordBytes();
      pushed.status = PieceStatus::kOk;
      const std::vector<uint64_t> sums = TestChecksums(name.key, plane);
      pushed.checksums = sums;
      ResolvedPush to;
      store_.node().ResolvePush(session, {&pushed.piece, 1}, {&to, 1});
      ASSERT_EQ(to.status, PieceStatus::kOk);
      PieceStatus verdict = PieceStatus::kLost;
      store_.node().CommitPush(session, {&pushed, 1}, {&verdict, 1});
      ASSERT_EQ(verdict, PieceStatus::kOk);
    }
  }

  StoreUnderTest store_;
  std::unique_ptr<RpcServer> server_;
  std::unique_ptr<StoreApi> stub_;
};

TEST_P(StoreApiTest, Errors_KeepCodeAndText) {
  const auto lost = api().Lookup({SessionId(99), store_.tickets().Make(1), TestNames(1, 1)});
  EXPECT_EQ(lost.status().code(), StatusCode::kNotFound);
  EXPECT_NE(lost.status().message().find("no session 99"), absl::string_view::npos);
  OpenSessionRequest bad = TestOpen("w");
  bad.geometry.head_dim = 33;
  EXPECT_EQ(api().OpenSession(bad).status().code(), StatusCode::kInvalidArgument);
  bad = TestOpen("w");
  bad.versions = {7, 9};
  EXPECT_EQ(api().OpenSession(bad).status().code(), StatusCode::kFailedPrecondition);
  const auto session = api().OpenSession(TestOpen("w"));
  ASSERT_TRUE(session.ok());
  EXPECT_EQ(api().Reserve({session->session, TicketMaker().Make(1), {}, 0}).status().code(),
            StatusCode::kUnauthenticated);
  const auto full = api().Reserve({session->session, store_.tickets().Make(1), {}, 17});
  EXPECT_EQ(full.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(full.status().message().find("no room for 17 blocks"), absl::string_view::npos);
  std::vector<BlockName> names = TestNames(1, 1);
  names[0].tokens.clear();
  EXPECT_EQ(api().Lookup({session->session, store_.tickets().Make(1), names}).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(api().CloseSession(SessionId(3)).code(), StatusCode::kNotFound);
}

TEST_P(StoreApiTest, AgedTicket_HasItsTurnKeepsWhatThereIsAndIsServedBeforeNewerOnes) {
  const auto session = api().OpenSession(TestOpen("w"));
  ASSERT_TRUE(session.ok()) << session.status();
  const SessionId id = session->session;
  const auto ask = [&](uint64_t ticket, uint32_t blocks, absl::Duration waited) {
    return api().Reserve({id, store_.tickets().Make(ticket), {}, blocks, waited});
  };
  ASSERT_TRUE(ask(1, 12, absl::ZeroDuration()).ok());
  EXPECT_EQ(ask(2, 8, absl::ZeroDuration()).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(store_.node().StatsNow().output_reserved_blocks, 12u);
  const auto pending = ask(2, 8, absl::Milliseconds(600));
  ASSERT_TRUE(pending.ok()) << pending.status();
  EXPECT_TRUE(pending->pending);
  EXPECT_GT(store_.node().StatsNow().output_reserved_blocks, 12u);
  const auto newer = ask(3, 1, absl::ZeroDuration());
  EXPECT_EQ(newer.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(newer.status().message().find("one that waits longer"), absl::string_view::npos)
      << newer.status();
  ASSERT_TRUE(api().Release({id, Ref(1)}).ok());
  const auto granted = ask(2, 8, absl::Milliseconds(700));
  ASSERT_TRUE(granted.ok()) << granted.status();
  EXPECT_FALSE(granted->pending);
  EXPECT_EQ(store_.node().StatsNow().output_reserved_blocks, 8u);
  EXPECT_TRUE(ask(3, 1, absl::ZeroDuration()).ok());
}

TEST_P(StoreApiTest, LifeOfABlock_EveryFieldArrives) {
  const auto session = api().OpenSession(TestOpen("w"));
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_NE(session->session.value(), 0u);
  EXPECT_EQ(session->secret.size(), kSessionSecretBytes);
  EXPECT_EQ(session->wire_version, kWireVersion);
  EXPECT_EQ(session->lease, absl::Seconds(10));
  EXPECT_EQ(session->store_epoch, BootEpoch(77));
  EXPECT_EQ(session->host_id, "test-host");
  const SessionId id = session->session;

  const auto names = TestNames(3, 5);
  const auto reserved = api().Reserve({id, store_.tickets().Make(1), names, 2});
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  ASSERT_EQ(reserved->blocks.size(), 3u);
  for (int i = 0; i < 2; ++i) {
    const BlockPlace& place = reserved->blocks[i].place;
    EXPECT_FALSE(reserved->blocks[i].already_sealed);
    EXPECT_NE(place.handle, 0u);
    EXPECT_NE(place.base_offset, kNoOffset);
    EXPECT_NE(place.residual_offset, kNoOffset);
    EXPECT_TRUE(place.base_checksums.empty());
    Write(id, 1, names[i], place.handle);
  }
  const std::vector<uint64_t> handles = {reserved->blocks[0].place.handle,
                                         reserved->blocks[2].place.handle, 12345};
  const auto sealed = api().Seal({id, Ref(1), handles});
  ASSERT_TRUE(sealed.ok());
  ASSERT_EQ(sealed->blocks.size(), 3u);
  EXPECT_EQ(sealed->blocks[0].outcome, SealReply::Outcome::kSealed);
  EXPECT_EQ(sealed->blocks[0].handle, handles[0]);
  EXPECT_EQ(sealed->blocks[1].outcome, SealReply::Outcome::kIncomplete);
  EXPECT_EQ(sealed->blocks[2].outcome, SealReply::Outcome::kLost);

  const auto found = api().Lookup({id, store_.tickets().Make(2), names});
  ASSERT_TRUE(found.ok());
  ASSERT_EQ(found->blocks.size(), 3u);
  for (int i = 0; i < 2; ++i) {
    const BlockPlace& place = found->blocks[i].place;
    ASSERT_EQ(found->blocks[i].presence, BlockPresence::kExact);
    EXPECT_EQ(place.handle, reserved->blocks[i].place.handle);
    EXPECT_EQ(place.base_offset, reserved->blocks[i].place.base_offset);
    EXPECT_EQ(place.residual_offset, reserved->blocks[i].place.residual_offset);
    EXPECT_EQ(place.base_checksums, TestChecksums(names[i].key, Plane::kBase));
    EXPECT_EQ(place.residual_checksums, TestChecksums(names[i].key, Plane::kResidual));
  }
  EXPECT_EQ(found->blocks[2].presence, BlockPresence::kAbsent);
  const auto again = api().Reserve({id, store_.tickets().Make(3), {names[0]}, 0});
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->blocks[0].already_sealed);

  // Everything is in memory; the third ticket pins the first block alone, the second the third not.
  const auto promoted = api().Promote({id,
                                       Ref(3),
                                       {PlaneRecordHandle(handles[0], Plane::kResidual),
                                        PlaneRecordHandle(handles[1], Plane::kBase), 12345},
                                       absl::Seconds(1)});
  ASSERT_TRUE(promoted.ok()) << promoted.status();
  EXPECT_EQ(promoted->outcomes,
            (std::vector{PromoteReply::Outcome::kResident, PromoteReply::Outcome::kLost,
                         PromoteReply::Outcome::kLost}));
  EXPECT_EQ(promoted->bytes_from_disk, 0u);
  EXPECT_EQ(api().Promote({SessionId(5), Ref(3), {}}).status().code(), StatusCode::kNotFound);

  const auto stats = api().Stats();
  ASSERT_TRUE(stats.ok());
  const uint64_t record = TestGeometry().RecordBytes();
  EXPECT_EQ(stats->name, "store-0");
  EXPECT_EQ(stats->epoch, BootEpoch(77));
  EXPECT_EQ(stats->capacity_bytes, 32 * record);
  EXPECT_EQ(stats->used_bytes, 10 * record);
  EXPECT_EQ(stats->resident_bytes[0], 2 * record);
  EXPECT_EQ(stats->resident_bytes[1], 2 * record);
  EXPECT_EQ(stats->reserved_bytes, 6 * record);
  EXPECT_EQ(stats->blocks, 2u);
  EXPECT_EQ(stats->pinned_blocks, 2u);
  EXPECT_EQ(stats->pins, 5u);
  EXPECT_EQ(stats->output_reserved_blocks, 2u);
  EXPECT_EQ(stats->sessions, 1u);
  EXPECT_EQ(stats->tickets, 3u);
  EXPECT_EQ(stats->lookups, 1u);
  EXPECT_EQ(stats->lookup_blocks, 3u);
  EXPECT_EQ(stats->hit_blocks, 2u);
  EXPECT_EQ(stats->pushed_bytes, 4 * record);

  const auto renewed = api().Renew({id, {Ref(1), Ref(3)}});
  ASSERT_TRUE(renewed.ok());
  EXPECT_EQ(renewed->lease, absl::Seconds(10));
  EXPECT_EQ(api().Stats()->tickets, 2u);
  EXPECT_TRUE(api().Release({id, Ref(1)}).ok());
  EXPECT_TRUE(api().Release({id, Ref(1)}).ok());
  EXPECT_EQ(api().Stats()->pins, 1u);
  EXPECT_TRUE(api().CloseSession(id).ok());
  const auto end = api().Stats();
  EXPECT_EQ(end->pins, 0u);
  EXPECT_EQ(end->sessions, 0u);
  EXPECT_EQ(end->used_bytes, 4 * record);
}

TEST_P(StoreApiTest, PurgedTenant_IsFoundNoMoreAndOthersAre) {
  const auto session = api().OpenSession(TestOpen("w"));
  ASSERT_TRUE(session.ok()) << session.status();
  uint64_t ticket = 0;
  for (const std::string tenant : {"a", "b"}) {
    const auto names = TestNames(2, 5, tenant);
    const auto reserved =
        api().Reserve({session->session, store_.tickets().Make(++ticket, 1, tenant), names, 0, {}});
    ASSERT_TRUE(reserved.ok()) << reserved.status();
    for (int i = 0; i < 2; ++i) {
      Write(session->session, ticket, names[i], reserved->blocks[i].place.handle);
    }
  }
  ASSERT_TRUE(api().Release({session->session, Ref(1)}).ok());
  const auto purged = api().PurgeTenant({"a", absl::Seconds(1)});
  ASSERT_TRUE(purged.ok()) << purged.status();
  EXPECT_EQ(purged->blocks, 2u);
  EXPECT_EQ(purged->memory_bytes, 0u);
  EXPECT_TRUE(purged->disk_reclaimed) << "there is no disk";
  const auto pinned = api().PurgeTenant({"b", absl::Seconds(1)});
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  EXPECT_EQ(pinned->memory_bytes, 4u * TestGeometry().RecordBytes()) << "until it is let go";
  ASSERT_TRUE(api().Release({session->session, Ref(2)}).ok());
  EXPECT_EQ(api().Stats()->used_bytes, 0u);
  EXPECT_EQ(api().PurgeTenant({"nobody", absl::Seconds(1)})->blocks, 0u);
}

TEST_P(StoreApiTest, SecondWriter_LearnsTheWinner) {
  const auto session = api().OpenSession(TestOpen("w"));
  const auto names = TestNames(1, 5);
  const auto a = api().Reserve({session->session, store_.tickets().Make(1), names, 0});
  const auto b = api().Reserve({session->session, store_.tickets().Make(2), names, 0});
  ASSERT_TRUE(a.ok() && b.ok());
  Write(session->session, 2, names[0], b->blocks[0].place.handle);
  const auto sealed = api().Seal({session->session, Ref(1), {a->blocks[0].place.handle}});
  ASSERT_TRUE(sealed.ok());
  EXPECT_EQ(sealed->blocks[0].outcome, SealReply::Outcome::kWinnerElsewhere);
  EXPECT_EQ(sealed->blocks[0].handle, b->blocks[0].place.handle);
}

TEST_P(StoreApiTest, CallsOfManyThreads_AreSafe) {
  constexpr int kThreads = 4;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t] {
      const auto session = api().OpenSession(TestOpen(absl::StrCat("w", t)));
      ASSERT_TRUE(session.ok());
      for (uint64_t i = 0; i < 50; ++i) {
        const SignedTicket ticket = store_.tickets().Make(1 + t * 1000 + i);
        const TicketRef ref = Ref(1 + t * 1000 + i);
        ASSERT_TRUE(api().Lookup({session->session, ticket, TestNames(4, 5)}).ok());
        ASSERT_TRUE(api().Reserve({session->session, ticket, TestNames(1, 100 * t), 1}).ok());
        ASSERT_TRUE(api().Renew({session->session, {ref}}).ok());
        ASSERT_TRUE(api().Release({session->session, ref}).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto stats = api().Stats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->used_bytes, 0u);
  EXPECT_EQ(stats->tickets, 0u);
  EXPECT_EQ(stats->lookup_blocks, kThreads * 50u * 4u);
}

INSTANTIATE_TEST_SUITE_P(Ways, StoreApiTest, testing::Values(Way::kDirect, Way::kGrpc),
                         [](const auto& info) {
                           return info.param == Way::kDirect ? "Direct" : "Grpc";
                         });

TEST(StoreRpc, PeerThatIsGone_IsUnavailableAndNamed) {
  StoreUnderTest store(2);
  auto server = ServeStore(store.node(), "127.0.0.1:0");
  ASSERT_TRUE(server.ok());
  const std::string address = absl::StrCat("127.0.0.1:", (*server)->port());
  const auto stub = ConnectStore(address, absl::Seconds(5));
  ASSERT_TRUE(stub->Stats().ok());
  (*server)->Shutdown(absl::ZeroDuration());
  const auto stats = stub->Stats();
  EXPECT_EQ(stats.status().code(), StatusCode::kUnavailable);
  EXPECT_NE(stats.status().message().find(absl::StrCat("store at ", address)),
            absl::string_view::npos)
      << stats.status();
}

}  // namespace
}  // namespace kvt
