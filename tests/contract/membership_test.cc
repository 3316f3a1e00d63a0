// Membership agents against the real coordinator over gRPC: joining, the view, death, a coordinator
// that goes away and comes back.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/coordinator_service.h"
#include "gtest/gtest.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/client/membership_agent.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/support/tier_worker.h"

namespace kvt {
namespace {

// The coordinator as its main composes it, restartable on one port.
class Coordinator {
 public:
  Coordinator() { Start("127.0.0.1:0"); }
  ~Coordinator() { Stop(); }
  [[nodiscard]] std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  void Start(const std::string& address) {
    CoordinatorCoreOptions options;
    options.heartbeat_interval = absl::Milliseconds(100);
    options.death_after = absl::Seconds(2);
    options.lease = absl::Seconds(3);
    options.view_version_base = ++boots_ * 1000;
    options.ticket_boot = static_cast<uint32_t>(boots_);
    service_ = std::make_unique<CoordinatorService>(options, RealClock::Get(), absl::Now(),
                                                    TicketSigner::Generate());
    auto server = ServeCoordinator(*service_, address);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    port_ = server_->port();
    stopping_ = false;
    ticker_ = std::thread([this] {
      MutexLock lock(mu_);
      while (!stopping_) {
        service_->Tick();
        wake_.WaitFor(mu_, absl::Milliseconds(50));
      }
    });
  }
  void Stop() {
    if (server_ == nullptr) return;
    server_->Shutdown(absl::ZeroDuration());
    {
      MutexLock lock(mu_);
      stopping_ = true;
    }
    wake_.NotifyAll();
    ticker_.join();
    server_.reset();
    service_.reset();
  }
  CoordinatorService& service() { return *service_; }

 private:
  uint64_t boots_ = 0;
  int port_ = 0;
  std::unique_ptr<CoordinatorService> service_;
  std::unique_ptr<RpcServer> server_;
  Mutex mu_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread ticker_;
};

// A node that does nothing but belong to the cluster.
class Node {
 public:
  Node(const std::string& address, NodeKind kind, const std::string& name, uint64_t epoch,
       WireVersionRange versions = {})
      : api_(ConnectCoordinator(address, absl::Seconds(2))) {
    MembershipOptions options;
    options.node.kind = kind;
    options.node.name = name;
    options.node.epoch = BootEpoch(epoch);
    options.node.versions = versions;
    options.node.control_address = absl::StrCat("127.0.0.1:", epoch);
    options.node.capacity_bytes = 1;
    options.node.batch_max = 1;
    options.node.model.name = "m";
    options.node.model.fingerprint = "f";
    options.node.model.numerics_id = "n";
    options.node.model.geometry = TestGeometry();
    options.node.model.context_tokens_max = 100;
    options.retry_max = absl::Milliseconds(200);
    MembershipEvents events;
    events.load = [] { return LoadReport{}; };
    events.on_registered = [this](const RegisterReply& reply) {
      MutexLock lock(mu_);
      keys_.push_back(reply.ticket_public_key);
    };
    events.on_view = [this](const ClusterView& view) {
      MutexLock lock(mu_);
      stores_.clear();
      for (const StoreRef& store : view.stores) stores_.push_back(store.name);
    };
    agent_ = std::make_unique<MembershipAgent>(*api_, std::move(options), std::move(events),
                                               RealClock::Get());
    thread_ = std::thread([this] { agent_->Run(); });
  }
  ~Node() { Leave(); }
  void Leave() {
    agent_->Stop();
    if (thread_.joinable()) thread_.join();
  }
  MembershipAgent& agent() { return *agent_; }
  std::vector<NodeName> stores() {
    MutexLock lock(mu_);
    return stores_;
  }
  std::vector<std::string> keys() {
    MutexLock lock(mu_);
    return keys_;
  }

 private:
  std::unique_ptr<CoordinatorApi> api_;
  std::unique_ptr<MembershipAgent> agent_;
  Mutex mu_;
  std::vector<NodeName> stores_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> keys_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

using Names = std::vector<NodeName>;

TEST(Membership, Nodes_ThatJoinAndLeave_AreSeenByTheOthers) {
  Coordinator coordinator;
  Node worker(coordinator.address(), NodeKind::kDecode, "decode-0", 1);
  ASSERT_TRUE(worker.agent().WaitRegistered(absl::Seconds(20)).ok());
  EXPECT_FALSE(worker.agent().IsFenced());
  ASSERT_TRUE(Eventually([&] { return worker.keys().size() == 1; }));
  EXPECT_EQ(worker.keys()[0].size(), 32u);
  Node first(coordinator.address(), NodeKind::kStore, "store-0", 2);
  EXPECT_TRUE(Eventually([&] { return worker.stores() == Names{"store-0"}; }));
  Node second(coordinator.address(), NodeKind::kStore, "store-1", 3);
  EXPECT_TRUE(Eventually([&] { return worker.stores() == Names{"store-0", "store-1"}; }));
  first.Leave();
  EXPECT_TRUE(Eventually([&] { return worker.stores() == Names{"store-1"}; }));
}

TEST(Membership, CoordinatorThatRestarts_IsJoinedAgainByEveryNode) {
  Coordinator coordinator;
  Node worker(coordinator.address(), NodeKind::kDecode, "decode-0", 1);
  Node store(coordinator.address(), NodeKind::kStore, "store-0", 2);
  ASSERT_TRUE(Eventually([&] { return worker.stores() == Names{"store-0"}; }));
  const std::string address = coordinator.address();
  coordinator.Stop();
  // Away for longer than the lease: the worker fences itself, and nothing else happens to it.
  EXPECT_TRUE(Eventually([&] { return worker.agent().IsFenced(); }));
  EXPECT_EQ(worker.stores(), Names{"store-0"});
  coordinator.Start(address);
  EXPECT_TRUE(Eventually([&] { return !worker.agent().IsFenced(); }));
  EXPECT_TRUE(Eventually([&] { return worker.stores() == Names{"store-0"}; }));
  ASSERT_TRUE(Eventually([&] { return worker.keys().size() == 2; }));
  EXPECT_NE(worker.keys()[0], worker.keys()[1]);  // this test's coordinator keeps no key
  EXPECT_TRUE(Eventually([&] {
    const auto status = coordinator.service().Status();
    return status.ok() && status->nodes.size() == 2;
  }));
}

TEST(Membership, F12_NodeOfTheVersionBefore_JoinsAndOneOfTheNextAloneIsRefusedNamingBoth) {
  Coordinator coordinator;
  Node before(coordinator.address(), NodeKind::kStore, "store-0", 1,
              {kWireVersion - 1, kWireVersion - 1});
  ASSERT_TRUE(before.agent().WaitRegistered(absl::Seconds(20)).ok());
  // Speaks ours too: what a half-updated cluster looks like.
  Node next(coordinator.address(), NodeKind::kDecode, "decode-0", 2,
            {kWireVersion, kWireVersion + 1});
  ASSERT_TRUE(next.agent().WaitRegistered(absl::Seconds(20)).ok());
  EXPECT_TRUE(Eventually([&] { return next.stores() == Names{"store-0"}; }));
  Node beyond(coordinator.address(), NodeKind::kDecode, "decode-1", 3,
              {kWireVersion + 1, kWireVersion + 1});
  const absl::Status refused = beyond.agent().WaitRegistered(absl::Seconds(2));
  ASSERT_FALSE(refused.ok());
  const std::string text(refused.message());
  for (const std::string& part :
       {absl::StrCat("decode-1 speaks wire versions ", kWireVersion + 1, " to ", kWireVersion + 1),
        absl::StrCat("this coordinator ", kWireVersionMin, " to ", kWireVersion)}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
  }
  EXPECT_TRUE(beyond.agent().IsFenced());
  const auto status = coordinator.service().Status();
  ASSERT_TRUE(status.ok());
  EXPECT_EQ(status->nodes.size(), 2u) << "the refused one is no member";
}

TEST(Membership, NoCoordinator_IsReportedByItsAddress) {
  Node worker("127.0.0.1:1", NodeKind::kDecode, "decode-0", 1);
  const absl::Status status = worker.agent().WaitRegistered(absl::Seconds(2));
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("127.0.0.1:1"), absl::string_view::npos) << status;
  EXPECT_TRUE(worker.agent().IsFenced());
}

}  // namespace
}  // namespace kvt
