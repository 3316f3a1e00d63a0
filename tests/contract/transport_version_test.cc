// Peers of other versions on every data plane: the version before is spoken to in its own words, an
// overlap is used at its highest, anything else is refused at attach with both sides named (F12).
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/contract/transport_fixture.h"

namespace kvt {
namespace {

constexpr uint16_t kNow = kTransportWireVersion;
constexpr uint16_t kBefore = kNow - 1;
static_assert(kTransportWireVersionMin == kBefore, "a node speaks its version and the one before");

class TransportVersionTest : public TransportTest {
 protected:
  void Start(TransportVersions client, TransportVersions server) {
    resolver_ = MakeResolver(4);
    handles_.clear();
    for (uint32_t i = 0; i < 4; ++i) handles_.push_back(resolver_->Seal(i));
    server_ = StartServer(GetParam(), *resolver_, server);
    transport_ = MakeTransport(GetParam(), client);
    ASSERT_NO_FATAL_FAILURE(Connect());
  }
  void Stop() {
    channel_.reset();
    transport_.reset();
    server_.reset();
  }

  // Bytes go both ways, and a verdict that only the new version has arrives as `expired`.
  void ExpectServes(PieceStatus expired) {
    TestBurst pull(4, 30, kSlot);
    for (uint32_t i = 0; i < 4; ++i) {
      pull.SetPiece(i, handles_[i], 0);
      pull.SetChecksums(i, i, resolver_->Checksums(i));
    }
    pull.pull(3).piece.ticket = ArenaResolver::kExpiredTicket;
    ASSERT_TRUE(pull.Pull(*channel_, In(kPatience)).ok());
    ASSERT_TRUE(pull.Await().status.ok());
    for (uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(pull.Matches(i, i, 1)) << i;
    // Same-host readers are trusted with the mapping: nobody is asked.
    if (GetParam() != Backend::kShm) {
      EXPECT_EQ(pull.status(3), expired) << PieceStatusName(pull.status(3));
    }

    TestBurst push(2, 30, kSlot);
    for (uint32_t i = 0; i < 2; ++i) {
      push.SetPiece(i, resolver_->Reserve(i), 0);
      push.FillSources(i, i, 9);
    }
    push.push(1).piece.ticket = ArenaResolver::kExpiredTicket;
    ASSERT_TRUE(push.Push(*channel_, In(kPatience), PushChecksums::kCompute).ok());
    ASSERT_TRUE(push.Await().status.ok());
    EXPECT_EQ(push.status(0), PieceStatus::kOk);
    EXPECT_EQ(push.status(1), expired) << PieceStatusName(push.status(1));
  }

  absl::Status Refusal(TransportVersions client, TransportVersions server) {
    resolver_ = MakeResolver(1);
    server_ = StartServer(GetParam(), *resolver_, server);
    transport_ = MakeTransport(GetParam(), client);
    const absl::Status status =
        transport_->Connect(server_->Address(), TestToken(), In(kPatience)).status();
    EXPECT_EQ(resolver_->attached(), 0);
    Stop();
    return status;
  }
};
INSTANTIATE_TEST_SUITE_P(All, TransportVersionTest,
                         testing::Values(Backend::kLoopback, Backend::kShm, Backend::kUcx), NameOf);

TEST_P(TransportVersionTest, F12_SameVersion_EveryVerdictArrives) {
  ASSERT_NO_FATAL_FAILURE(Start({}, {}));
  ExpectServes(PieceStatus::kExpired);
}

TEST_P(TransportVersionTest, F12_ClientOfTheVersionBefore_IsServedInItsOwnWords) {
  ASSERT_NO_FATAL_FAILURE(Start({kBefore, kBefore}, {}));
  ExpectServes(PieceStatus::kRefused);
}

TEST_P(TransportVersionTest, F12_StoreOfTheVersionBefore_ServesTheNewClient) {
  ASSERT_NO_FATAL_FAILURE(Start({}, {kBefore, kBefore}));
  ExpectServes(PieceStatus::kRefused);
}

TEST_P(TransportVersionTest, F12_NewerPeerWhoseRangeOverlaps_IsSpokenToInOurVersion) {
  ASSERT_NO_FATAL_FAILURE(Start({kNow, kNow + 1}, {}));
  ExpectServes(PieceStatus::kExpired);
  Stop();
  ASSERT_NO_FATAL_FAILURE(Start({}, {kNow, kNow + 1}));
  ExpectServes(PieceStatus::kExpired);
}

TEST_P(TransportVersionTest, F12_VersionOutOfRange_IsRefusedAtAttachNamingBothSides) {
  const std::string newer = absl::StrCat(kNow + 1, " to ", kNow + 2);
  const std::string ours = absl::StrCat(kBefore, " to ", kNow);
  absl::Status status = Refusal({kNow + 1, kNow + 2}, {});
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("client speaks wire versions ", newer)))
      << status;
  EXPECT_TRUE(absl::StrContains(status.message(), absl::StrCat("store ", ours))) << status;
  status = Refusal({}, {kNow + 1, kNow + 2});
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), newer)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), ours)) << status;
}

// One rank of a tensor-parallel writer, another head size, other layers, another layout.
TEST_P(TransportVersionTest, F12_AnotherGeometry_IsRefusedAtAttachWithBothShown) {
  resolver_ = MakeResolver(1);
  server_ = StartServer(GetParam(), *resolver_);
  transport_ = MakeTransport(GetParam());
  const auto change = [&](auto edit) {
    SessionToken token = TestToken();
    edit(token.geometry);
    const absl::Status status =
        transport_->Connect(server_->Address(), token, In(kPatience)).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), token.geometry.ToString())) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), TestGeometry().ToString())) << status;
  };
  change([](Geometry& geometry) { geometry.kv_heads = 1; });
  change([](Geometry& geometry) { geometry.head_dim = 128; });
  change([](Geometry& geometry) { geometry.layers = 29; });
  change([](Geometry& geometry) { geometry.layout = static_cast<NamedLayout>(7); });
  EXPECT_EQ(server_->Stats().attaches_refused, 4u);
  EXPECT_EQ(resolver_->attached(), 0);
}

TEST(Verdict, OfAVersionThatDoesNotKnowIt_BecomesTheNearestThatItKnows) {
  for (int s = 0; s < PieceStatusesIn(kNow); ++s) {
    const auto status = static_cast<PieceStatus>(s);
    EXPECT_EQ(VerdictIn(kNow, status), status);
    EXPECT_LT(static_cast<int>(VerdictIn(1, status)), PieceStatusesIn(1));
    if (s < PieceStatusesIn(1)) {
      EXPECT_EQ(VerdictIn(1, status), status);
    }
    EXPECT_NE(PieceStatusName(status), "?");
  }
  EXPECT_EQ(VerdictIn(1, PieceStatus::kOnDisk), PieceStatus::kLost);
  EXPECT_EQ(VerdictIn(1, PieceStatus::kExpired), PieceStatus::kRefused);
}

}  // namespace
}  // namespace kvt
