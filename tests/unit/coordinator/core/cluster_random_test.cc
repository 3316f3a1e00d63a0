// Random sequences of everything that can happen to a cluster, with its invariants checked after
// each step. The seeds are printed with a failure.
#include <algorithm>
#include <map>
#include <set>

#include "kernels/base/random.h"
#include "tests/unit/coordinator/core/cluster_fixture.h"

namespace kvt {
namespace {

constexpr int kSteps = 1500;

class World : public ClusterFixture {
 public:
  void TestBody() override {}
  explicit World(uint64_t seed) : random_(seed) {}

  void Step() {
    switch (random_.Below(12)) {
      case 0: Toggle(); break;
      case 1: Restart(); break;
      case 2:
      case 3: Try(Admit(static_cast<uint32_t>(1 + random_.Below(999)), 1)); break;
      case 4:
      case 5: PlaceOne(); break;
      case 6: RegrantOne(); break;
      case 7: CancelOne(); break;
      case 8:
      case 9: UpdateOne(); break;
      default: Run(absl::Milliseconds(100 * (1 + random_.Below(8)))); break;
    }
    Check();
  }

 private:
  std::string SomeNode() {
    static const char* const kNames[] = {"store-0", "store-1", "prefill-0", "prefill-1",
                                         "decode-0", "decode-1", "decode-2"};
    return kNames[random_.Below(7)];
  }
  static NodeKind KindOf(const std::string& name) {
    if (name[0] == 's') return NodeKind::kStore;
    return name[0] == 'p' ? NodeKind::kPrefill : NodeKind::kDecode;
  }
  void Toggle() {
    const std::string name = SomeNode();
    if (alive_.erase(name) > 0) return;  // falls silent
    const uint64_t epoch = std::max<uint64_t>(1, boots_[name]);
    boots_[name] = epoch;
    if (cluster_.Register(now_, TestNode(KindOf(name), name, epoch)).ok()) alive_[name] = epoch;
  }
  void Restart() {
    const std::string name = SomeNode();
    const uint64_t epoch = ++boots_[name];
    ASSERT_TRUE(cluster_.Register(now_, TestNode(KindOf(name), name, epoch)).ok());
    alive_[name] = epoch;
  }
  void Try(const absl::StatusOr<Grant>& grant) {
    if (!grant.ok()) return;
    const Ticket& ticket = grant->ticket;
    auto [it, fresh] = tickets_.try_emplace(ticket.id, ticket);
    if (!fresh) {
      EXPECT_GE(ticket.epoch, it->second.epoch);
      it->second = ticket;
    }
    for (const StoreRef& store : ticket.stores) EXPECT_EQ(KindOf(store.name), NodeKind::kStore);
  }
  const Ticket* SomeTicket() {
    if (tickets_.empty()) return nullptr;
    auto it = tickets_.begin();
    std::advance(it, static_cast<long>(random_.Below(tickets_.size())));
    return &it->second;
  }
  void PlaceOne() {
    if (const Ticket* ticket = SomeTicket()) {
      std::vector<NodeName> refused;
      if (random_.Below(3) == 0) refused.push_back("decode-0");
      const auto grant = cluster_.Place(now_, *ticket, refused);
      if (grant.ok()) {
        EXPECT_EQ(StateOf(grant->ticket.decode_worker), "ready");
      }
      Try(grant);
    }
  }
  void RegrantOne() {
    if (const Ticket* ticket = SomeTicket()) {
      const auto grant = cluster_.Regrant(now_, *ticket, "test");
      if (grant.ok()) {
        EXPECT_EQ(StateOf(grant->ticket.prefill_worker), "ready");
      }
      Try(grant);
    }
  }
  void CancelOne() {
    if (const Ticket* ticket = SomeTicket()) {
      EXPECT_TRUE(cluster_.Cancel(now_, ticket->id, ticket->capability).ok());
      EXPECT_TRUE(IsFinal(Find(ticket->id).phase));
    }
  }
  void UpdateOne() {
    if (const Ticket* ticket = SomeTicket()) {
      const auto phase = static_cast<RequestPhase>(random_.Below(7));
      Report(*ticket, random_.Below(4) == 0 ? SomeNode() : Holder(*ticket), phase, "reported");
    }
  }
  std::string Holder(const Ticket& ticket) {
    return ticket.decode_worker.empty() || random_.Below(2) == 0 ? ticket.prefill_worker
                                                                 : ticket.decode_worker;
  }

  void Check() {
    const ClusterStatus status = cluster_.Status(now_);
    // R3, and the counts agree with the list.
    EXPECT_EQ(status.admitted,
              status.running + status.done + status.failed + status.cancelled);
    std::map<RequestPhase, uint64_t> phases;
    uint64_t running = 0;
    std::map<TicketId, RequestStatus> requests;
    for (const RequestStatus& request : cluster_.Requests(now_)) {
      ++phases[request.phase];
      running += IsFinal(request.phase) ? 0 : 1;
      EXPECT_TRUE(requests.try_emplace(request.id, request).second);
      // R1 and R2.
      if (const auto before = last_.find(request.id); before != last_.end()) {
        if (IsFinal(before->second.phase)) {
          EXPECT_EQ(request.phase, before->second.phase);
        }
        EXPECT_GE(request.epoch, before->second.epoch);
        if (request.epoch == before->second.epoch) {
          EXPECT_GE(request.phase, before->second.phase);
        }
      }
      if (request.phase == RequestPhase::kFailed) {
        EXPECT_FALSE(request.error.empty());
      }
    }
    EXPECT_EQ(running, status.running);
    EXPECT_EQ(phases[RequestPhase::kDone], status.done);
    EXPECT_EQ(phases[RequestPhase::kFailed], status.failed);
    EXPECT_EQ(phases[RequestPhase::kCancelled], status.cancelled);
    for (const auto& [id, before] : last_) EXPECT_TRUE(requests.contains(id));
    last_ = std::move(requests);
    // M2, M3.
    const ClusterView view = cluster_.View();
    std::set<std::string> stores;
    for (const StoreRef& store : view.stores) stores.insert(store.name);
    for (const NodeStatus& node : status.nodes) {
      if (node.kind == NodeKind::kStore) {
        EXPECT_EQ(stores.contains(node.name), node.state == "ready") << node.name;
      }
      if (alive_.contains(node.name)) {
        EXPECT_NE(node.state, "dead") << node.name;
      }
      if (node.since_heartbeat > options_.death_after + absl::Milliseconds(100)) {
        EXPECT_EQ(node.state, "dead") << node.name;
      }
    }
    EXPECT_GE(view.version, view_version_);
    if (view.version == view_version_) {
      EXPECT_EQ(stores, stores_);
    }
    view_version_ = view.version;
    stores_ = std::move(stores);
  }

  Random random_;
  std::map<std::string, uint64_t> boots_;
  std::map<TicketId, Ticket> tickets_;
  std::map<TicketId, RequestStatus> last_;
  uint64_t view_version_ = 0;
  std::set<std::string> stores_;
};

TEST(ClusterRandom, ThousandsOfSteps_KeepTheInvariants) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    World world(seed);
    for (int step = 0; step < kSteps && !::testing::Test::HasFailure(); ++step) {
      SCOPED_TRACE(absl::StrCat("step ", step));
      world.Step();
    }
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace kvt
