#include "coordinator/core/membership.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "tests/unit/coordinator/core/cluster_fixture.h"

namespace kvt {
namespace {

using Membership_ = ClusterFixture;

TEST_F(Membership_, NodeSilentForTwoSeconds_IsDeclaredDeadWithinThree) {
  JoinUsual();
  Run(absl::Seconds(1));
  alive_.erase("decode-1");
  Run(absl::Milliseconds(1900));
  EXPECT_EQ(StateOf("decode-1"), "ready");
  Run(absl::Milliseconds(300));
  EXPECT_EQ(StateOf("decode-1"), "dead");
  EXPECT_EQ(StateOf("decode-0"), "ready");
  EXPECT_TRUE(HasEvent("decode-1 (pid 101) declared dead: no heartbeat for 2.0 s"));
}

TEST_F(Membership_, RestartFasterThanAHeartbeat_IsANewEpochAndKillsTheOldOne) {
  JoinUsual();
  Run(absl::Milliseconds(100));
  Join(NodeKind::kDecode, "decode-1", 2);
  EXPECT_TRUE(HasEvent("decode-1 (pid 101) declared dead: restarted"));
  EXPECT_TRUE(cluster_.Heartbeat(now_, Beat("decode-1", 1)).unknown);
  EXPECT_FALSE(cluster_.Heartbeat(now_, Beat("decode-1", 2)).unknown);
}

TEST_F(Membership_, SupersededBoot_IsRefusedNamingWhoHasTheName) {
  JoinUsual();
  Join(NodeKind::kDecode, "decode-1", 2);
  const absl::Status status = cluster_.Register(now_, TestNode(NodeKind::kDecode, "decode-1", 1));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Contains(status, "pid 102")) << status;
}

TEST_F(Membership_, RepeatedRegistration_IsIdempotent) {
  JoinUsual();
  const uint64_t version = cluster_.View().version;
  const size_t nodes = cluster_.Status(now_).nodes.size();
  EXPECT_TRUE(cluster_.Register(now_, TestNode(NodeKind::kDecode, "decode-1")).ok());
  EXPECT_EQ(cluster_.Status(now_).nodes.size(), nodes);
  EXPECT_EQ(cluster_.View().version, version);
}

TEST_F(Membership_, DeadNodeThatComesBack_RegistersAgain) {
  JoinUsual();
  alive_.erase("store-0");
  Run(absl::Seconds(3));
  EXPECT_TRUE(cluster_.View().stores.empty());
  EXPECT_TRUE(cluster_.Heartbeat(now_, Beat("store-0")).unknown);
  Join(NodeKind::kStore, "store-0");
  EXPECT_EQ(cluster_.View().stores.size(), 1u);
  EXPECT_TRUE(HasEvent("store-0 (pid 101) came back"));
}

TEST_F(Membership_, ViewVersion_RisesExactlyWithTheStores) {
  JoinUsual();
  const uint64_t before = cluster_.View().version;
  Join(NodeKind::kDecode, "decode-2");
  EXPECT_EQ(cluster_.View().version, before);
  Join(NodeKind::kStore, "store-1");
  EXPECT_GT(cluster_.View().version, before);
  const HeartbeatReply reply = cluster_.Heartbeat(now_, Beat("prefill-0"));
  EXPECT_EQ(reply.view.version, cluster_.View().version);
  EXPECT_EQ(reply.view.stores.size(), 2u);
  HeartbeatRequest current = Beat("prefill-0");
  current.view_version = reply.view.version;
  EXPECT_EQ(cluster_.Heartbeat(now_, current).view.version, 0u);
}

TEST_F(Membership_, DrainingStore_LeavesTheViewAndIsTold) {
  JoinUsual();
  Join(NodeKind::kStore, "store-1");
  ASSERT_TRUE(cluster_.SetDraining(now_, "store-1", true).ok());
  EXPECT_EQ(cluster_.View().stores.size(), 1u);
  EXPECT_TRUE(cluster_.Heartbeat(now_, Beat("store-1")).drain);
  EXPECT_TRUE(cluster_.Register(now_, TestNode(NodeKind::kStore, "store-1")).ok());
  EXPECT_EQ(cluster_.View().stores.size(), 1u);  // registering again does not end a drain
  EXPECT_EQ(cluster_.SetDraining(now_, "nobody", true).code(), absl::StatusCode::kNotFound);
}

TEST_F(Membership_, WorkersOfOneModelThatDiffer_AreRefusedWithBothSides) {
  JoinUsual();
  RegisterRequest other = TestNode(NodeKind::kDecode, "decode-9");
  other.model.geometry.layers = 3;
  absl::Status status = cluster_.Register(now_, other);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Contains(status, "L3 H1 D32")) << status;
  EXPECT_TRUE(Contains(status, "L2 H1 D32")) << status;
  EXPECT_TRUE(Contains(status, "decode-9")) << status;
  other = TestNode(NodeKind::kPrefill, "prefill-9");
  other.model.numerics_id = "cpu/other";
  status = cluster_.Register(now_, other);
  EXPECT_TRUE(Contains(status, "cpu/other") && Contains(status, "cpu/test")) << status;
  other = TestNode(NodeKind::kPrefill, "prefill-9");
  other.model.fingerprint = "f2";
  EXPECT_FALSE(cluster_.Register(now_, other).ok());
  other.model.name = "another";
  EXPECT_TRUE(cluster_.Register(now_, other).ok());
  EXPECT_TRUE(HasEvent("decode-9 (pid 101) was refused"));
}

TEST_F(Membership_, MalformedRegistrations_AreRefusedNamingTheField) {
  const auto refused = [&](auto change, const std::string& field) {
    RegisterRequest request = TestNode(NodeKind::kDecode, "decode-0");
    change(request);
    const absl::Status status = cluster_.Register(now_, request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_TRUE(Contains(status, field)) << status;
  };
  refused([](RegisterRequest& r) { r.name = ""; }, "name");
  refused([](RegisterRequest& r) { r.name = "a b"; }, "name");
  refused([](RegisterRequest& r) { r.name = std::string(65, 'a'); }, "name");
  refused([](RegisterRequest& r) { r.name = "\x1b[2J"; }, "name");
  refused([](RegisterRequest& r) { r.epoch = BootEpoch(); }, "epoch");
  refused([](RegisterRequest& r) { r.control_address = ""; }, "control_address");
  refused([](RegisterRequest& r) { r.model.name = ""; }, "model.name");
  refused([](RegisterRequest& r) { r.model.fingerprint = ""; }, "model.fingerprint");
  refused([](RegisterRequest& r) { r.model.numerics_id = ""; }, "model.numerics_id");
  refused([](RegisterRequest& r) { r.model.geometry.head_dim = 33; }, "head_dim");
  refused([](RegisterRequest& r) { r.model.context_tokens_max = 0; }, "context_tokens_max");
}

TEST_F(Membership_, WireVersionsThatDoNotMeet_AreRefusedWithBothRanges) {
  RegisterRequest request = TestNode(NodeKind::kStore, "store-0");
  request.versions = {kWireVersion + 1, kWireVersion + 2};
  const absl::Status status = cluster_.Register(now_, request);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Contains(status, absl::StrCat("versions ", kWireVersion + 1))) << status;
}

TEST_F(Membership_, RefusedNodeThatTriesAgainAndAgain_IsOneEventAMinute) {
  RegisterRequest request = TestNode(NodeKind::kStore, "store-0");
  request.versions = {kWireVersion + 1, kWireVersion + 2};
  const auto told = [&] {
    const std::vector<ClusterEvent> events = cluster_.Status(now_).events;
    return std::count_if(events.begin(), events.end(), [](const ClusterEvent& event) {
      return absl::StrContains(event.text, "store-0 (pid");
    });
  };
  for (int second = 0; second < 59; ++second) {
    EXPECT_FALSE(cluster_.Register(now_, request).ok());
    EXPECT_EQ(told(), 1);
    Run(absl::Seconds(1));
  }
  Run(absl::Seconds(2));
  EXPECT_FALSE(cluster_.Register(now_, request).ok());
  EXPECT_EQ(told(), 2);
}

TEST_F(Membership_, NameOfAnAliveNodeOfAnotherKind_AlreadyExists) {
  JoinUsual();
  const absl::Status status = cluster_.Register(now_, TestNode(NodeKind::kStore, "decode-0", 7));
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(Membership_, CoordinatorThatStalled_DoesNotBlameTheNodes) {
  JoinUsual();
  Run(absl::Seconds(1));
  now_.monotonic += absl::Seconds(30);
  now_.unix += absl::Seconds(30);
  cluster_.Tick(now_);
  EXPECT_EQ(StateOf("decode-0"), "ready");
  EXPECT_TRUE(HasEvent("stalled for 30.0 s"));
  alive_.clear();
  Run(absl::Seconds(3));
  EXPECT_EQ(StateOf("decode-0"), "dead");
}

TEST_F(Membership_, NodeThatLeaves_IsGoneWithoutADeath) {
  JoinUsual();
  EXPECT_EQ(cluster_.Leave(now_, "store-0", BootEpoch(9)).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(cluster_.Leave(now_, "store-0", BootEpoch(1)).ok());
  EXPECT_EQ(StateOf("store-0"), "");
  EXPECT_TRUE(HasEvent("store-0 (pid 101) left"));
  EXPECT_TRUE(cluster_.View().stores.empty());
}

TEST_F(Membership_, ManyDeadNodes_AreForgottenOldestFirst) {
  for (size_t i = 0; i < kDeadNodesMax + 10; ++i) {
    Join(NodeKind::kStore, absl::StrCat("store-", i));
    Run(absl::Milliseconds(100));
  }
  alive_.clear();
  Run(absl::Seconds(15));
  EXPECT_EQ(cluster_.Status(now_).nodes.size(), kDeadNodesMax);
  EXPECT_EQ(StateOf("store-0"), "");
  EXPECT_EQ(StateOf(absl::StrCat("store-", kDeadNodesMax + 9)), "dead");
}

TEST_F(Membership_, F20_StoreThatIsStarting_IsAliveButNotHandedOutUntilReady) {
  JoinUsual();
  RegisterRequest large = TestNode(NodeKind::kStore, "store-1");
  large.starting = true;
  ASSERT_TRUE(cluster_.Register(now_, large).ok());
  const uint64_t version = cluster_.View().version;
  EXPECT_EQ(StateOf("store-1"), "starting");
  EXPECT_EQ(cluster_.View().stores.size(), 1u);
  HeartbeatRequest beat = Beat("store-1");
  beat.load.starting = true;
  beat.load.starting_percent = 37;
  ASSERT_FALSE(cluster_.Heartbeat(now_, beat).unknown);
  for (const NodeStatus& node : cluster_.Status(now_).nodes) {
    EXPECT_EQ(node.load.starting_percent, node.name == "store-1" ? 37u : 0u);
  }
  EXPECT_EQ(StateOf("store-1"), "starting");
  const auto grant = Admit();
  ASSERT_TRUE(grant.ok());
  EXPECT_EQ(grant->ticket.stores.size(), 1u);

  cluster_.Heartbeat(now_, Beat("store-1"));
  EXPECT_EQ(StateOf("store-1"), "ready");
  EXPECT_TRUE(HasEvent("store-1 (pid 101) is ready"));
  EXPECT_GT(cluster_.View().version, version);
  EXPECT_EQ(cluster_.View().stores.size(), 2u);
  // A repeated registration of this boot does not take it back.
  ASSERT_TRUE(cluster_.Register(now_, large).ok());
  EXPECT_EQ(StateOf("store-1"), "ready");
}

TEST_F(Membership_, StartingStoreThatIsSilent_IsDead) {
  JoinUsual();
  RegisterRequest large = TestNode(NodeKind::kStore, "store-1");
  large.starting = true;
  ASSERT_TRUE(cluster_.Register(now_, large).ok());
  Run(absl::Seconds(3));
  EXPECT_EQ(StateOf("store-1"), "dead");
}

}  // namespace
}  // namespace kvt
