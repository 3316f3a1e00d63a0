#include "kvstore/client/membership_agent.h"

#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace kvt {
namespace {

// A coordinator whose answers the test sets. It stands for one that is away, restarts or answers
// late, at chosen moments; the real one is met in tests/contract and tests/cluster.
class ScriptedCoordinator final : public CoordinatorApi {
 public:
  absl::StatusOr<RegisterReply> Register(const RegisterRequest& request) override {
    registered.push_back(request.name);
    if (!up) return absl::UnavailableError("nobody there");
    if (clock != nullptr) clock->Advance(register_takes);
    return RegisterReply{interval, lease, std::string(32, 'k'), epoch};
  }
  absl::StatusOr<HeartbeatReply> Heartbeat(const HeartbeatRequest& request) override {
    heartbeats.push_back(request);
    if (!up) return absl::UnavailableError("nobody there");
    HeartbeatReply reply = next;
    next = HeartbeatReply{};
    if (view.version > request.view_version) reply.view = view;
    return reply;
  }
  absl::Status Leave(const NodeName&, BootEpoch) override {
    ++left;
    return absl::OkStatus();
  }
  absl::StatusOr<AdmitReply> Admit(const AdmitRequest&) override { return Unused(); }
  absl::StatusOr<PlaceReply> Place(const PlaceRequest&) override { return Unused(); }
  absl::StatusOr<RegrantReply> Regrant(const RegrantRequest&) override { return Unused(); }
  absl::Status Cancel(TicketId, const std::string&) override { return Unused(); }
  absl::Status Update(const std::vector<TicketUpdate>&) override { return Unused(); }
  absl::StatusOr<ClusterView> View() override { return Unused(); }
  absl::StatusOr<ClusterStatus> Status() override { return Unused(); }
  absl::StatusOr<std::vector<RequestStatus>> Requests() override { return Unused(); }
  absl::StatusOr<std::vector<ModelInfo>> Models() override { return Unused(); }

  bool up = true;
  absl::Duration interval = absl::Milliseconds(500);
  absl::Duration lease = absl::Seconds(10);
  absl::Duration register_takes = absl::ZeroDuration();
  ManualClock* clock = nullptr;
  std::string epoch = "a";
  ClusterView view;
  HeartbeatReply next;
  std::vector<std::string> registered;
  std::vector<HeartbeatRequest> heartbeats;
  int left = 0;

 private:
  static absl::Status Unused() { return absl::UnimplementedError("not asked by an agent"); }
};

class MembershipAgentTest : public ::testing::Test {
 protected:
  MembershipAgentTest() {
    coordinator_.view.version = 5;
    coordinator_.view.stores.resize(1);
    coordinator_.view.stores[0].name = "store-0";
    options_.node.name = "decode-0";
    options_.node.epoch = BootEpoch(77);
    events_.load = [this] {
      LoadReport load;
      load.running = running_;
      return load;
    };
    events_.on_registered = [this](const RegisterReply& reply) { keys_.push_back(reply); };
    events_.on_view = [this](const ClusterView& view) { views_.push_back(view.version); };
    events_.on_cancelled = [this](const std::vector<TicketId>& ids) { cancelled_ = ids; };
    events_.on_drain = [this](bool draining) { drains_.push_back(draining); };
    events_.on_fenced = [this](bool fenced) { fences_.push_back(fenced); };
  }
  // Steps at every time the agent asks for, until `span` has passed.
  void StepFor(MembershipAgent& agent, absl::Duration span) {
    const absl::Time end = clock_.Now() + span;
    while (clock_.Now() < end) {
      const absl::Time next = agent.Step();
      clock_.Advance(std::max(absl::Milliseconds(1), std::min(next, end) - clock_.Now()));
    }
  }

  ManualClock clock_;
  ScriptedCoordinator coordinator_;
  MembershipOptions options_;
  MembershipEvents events_;
  uint32_t running_ = 0;
  std::vector<RegisterReply> keys_;
  std::vector<uint64_t> views_;
  std::vector<TicketId> cancelled_;
  std::vector<bool> drains_;
  std::vector<bool> fences_;
};

TEST_F(MembershipAgentTest, Registers_ThenHeartbeatsAtTheIntervalWithItsLoad) {
  MembershipAgent agent(coordinator_, options_, events_, clock_);
  EXPECT_TRUE(agent.IsFenced());
  EXPECT_FALSE(agent.IsRegistered());
  running_ = 3;
  StepFor(agent, absl::Seconds(2));
  EXPECT_TRUE(agent.IsRegistered());
  EXPECT_FALSE(agent.IsFenced());
  EXPECT_TRUE(agent.WaitRegistered(absl::ZeroDuration()).ok());
  ASSERT_EQ(coordinator_.heartbeats.size(), 4u);  // at 0, 0.5, 1.0 and 1.5 s
  EXPECT_EQ(coordinator_.heartbeats[0].view_version, 0u);
  EXPECT_EQ(coordinator_.heartbeats[1].view_version, 5u);
  EXPECT_EQ(coordinator_.heartbeats[1].load.running, 3u);
  EXPECT_EQ(coordinator_.heartbeats[1].epoch, BootEpoch(77));
  EXPECT_EQ(views_, std::vector<uint64_t>{5});
  EXPECT_EQ(fences_, std::vector<bool>{false});
}

TEST_F(MembershipAgentTest, Heartbeats_FallOnTheGridThatAllNodesOfAHostShare) {
  clock_.Advance(absl::Milliseconds(137));
  MembershipAgent agent(coordinator_, options_, events_, clock_);
  const absl::Time began = clock_.Now();
  EXPECT_EQ(agent.Step(), began);  // registered: the first heartbeat at once
  EXPECT_EQ(agent.Step(), began + absl::Milliseconds(500 - 137));
  clock_.Advance(absl::Milliseconds(500 - 137 + 4));  // woken late
  EXPECT_EQ(agent.Step(), clock_.Now() + absl::Milliseconds(500 - 4));
  EXPECT_EQ(coordinator_.heartbeats.size(), 2u);
}

TEST_F(MembershipAgentTest, CoordinatorThatHangs_FenceIsToldAtTheLeaseEndAndNotPolledFor) {
  MembershipAgent agent(coordinator_, options_, events_, clock_);
  StepFor(agent, absl::Milliseconds(100));
  const absl::Time lease_end = clock_.Now() - absl::Milliseconds(100) + absl::Seconds(10);
  coordinator_.up = false;
  int steps = 0;
  for (absl::Time next = agent.Step(); !fences_.back(); next = agent.Step(), ++steps) {
    // The clock counts whole nanoseconds.
    clock_.Advance(std::max(absl::Nanoseconds(1), next - clock_.Now()));
    ASSERT_LE(clock_.Now(), lease_end + absl::Seconds(1));
  }
  EXPECT_LE(clock_.Now() - lease_end, absl::Milliseconds(2));
  EXPECT_LT(steps, 20);  // the tries to reach it, up to 2 s apart
}

TEST_F(MembershipAgentTest, CoordinatorAwayAtStart_KeepsTryingWithBackoff) {
  coordinator_.up = false;
  MembershipAgent agent(coordinator_, options_, events_, clock_);
  StepFor(agent, absl::Seconds(60));
  const size_t tries = coordinator_.registered.size();
  EXPECT_GE(tries, 30u);  // at most 2 s apart
  EXPECT_LE(tries, 80u);  // and not in a tight loop
  EXPECT_EQ(agent.WaitRegistered(absl::ZeroDuration()).message(), "nobody there");
  coordinator_.up = true;
  StepFor(agent, absl::Seconds(3));
  EXPECT_TRUE(agent.IsRegistered());
}

TEST_F(MembershipAgentTest, LeaseNotRenewed_FencesAndRecovers) {
  MembershipAgent agent(coordinator_, options_, events_, clock_);
  StepFor(agent, absl::Seconds(1));
  coordinator_.up = false;
  StepFor(agent, absl::Seconds(9));
  EXPECT_FALSE(agent.IsFenced());
  StepFor(agent, absl::Seconds(2));
  EXPECT_TRUE(agent.IsFenced());
  EXPECT_EQ(fences_, (std::vector<bool>{false, true}));
  coordinator_.up = true;
  StepFor(agent, absl::Seconds(3));
  EXPECT_FALSE(agent.IsFenced());
  EXPECT_EQ(fences_, (std::vector<bool>{false, true, false}));
}

TEST_F(MembershipAgentTest, Lease_IsCountedFromBeforeTheRequest) {
  coordinator_.clock = &clock_;
  coordinator_.register_takes = absl::Seconds(4);
  MembershipAgent agent(coordinator_, options_, events_, clock_);
  agent.Step();
  coordinator_.up = false;
  clock_.Advance(absl::Seconds(5));
  EXPECT_FALSE(agent.IsFenced());
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(agent.IsFenced());  // 10 s after it was sent, though no step has run meanwhile
}

TEST_F(MembershipAgentTest, UnknownToARestartedCoordinator_RegistersAgainAndTakesItsView) {
  MembershipAgent agent(coordinator_, options_, events_, clock_);
  StepFor(agent, absl::Seconds(1));
  coordinator_.epoch = "b";
  coordinator_.view.version = 2;  // a new count
  coordinator_.next.unknown = true;
  StepFor(agent, absl::Seconds(1));
  EXPECT_EQ(coordinator_.registered.size(), 2u);
  ASSERT_EQ(keys_.size(), 2u);
  EXPECT_EQ(keys_[1].coordinator_epoch, "b");
  EXPECT_EQ(views_, (std::vector<uint64_t>{5, 2}));
}

TEST_F(MembershipAgentTest, WhatAHeartbeatBrings_IsDelivered) {
  MembershipAgent agent(coordinator_, options_, events_, clock_);
  StepFor(agent, absl::Milliseconds(600));
  coordinator_.next.cancelled = {TicketId(9), TicketId(11)};
  coordinator_.next.drain = true;
  StepFor(agent, absl::Milliseconds(500));
  EXPECT_EQ(cancelled_, (std::vector<TicketId>{TicketId(9), TicketId(11)}));
  EXPECT_EQ(drains_, std::vector<bool>{true});
  StepFor(agent, absl::Milliseconds(500));
  EXPECT_EQ(drains_, (std::vector<bool>{true, false}));
}

TEST_F(MembershipAgentTest, Run_UntilStopped_LeavesTheCluster) {
  MembershipAgent agent(coordinator_, options_, events_, RealClock::Get());
  std::thread thread([&] { agent.Run(); });
  EXPECT_TRUE(agent.WaitRegistered(absl::Seconds(10)).ok());
  agent.Stop();
  thread.join();
  EXPECT_EQ(coordinator_.left, 1);
  EXPECT_FALSE(agent.IsRegistered());
}

}  // namespace
}  // namespace kvt
