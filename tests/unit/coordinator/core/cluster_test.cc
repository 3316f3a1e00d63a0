#include "coordinator/core/cluster.h"

#include <set>

#include "tests/unit/coordinator/core/cluster_fixture.h"

namespace kvt {
namespace {

using Cluster_ = ClusterFixture;

TEST_F(Cluster_, Admit_GrantsThePrefillWorkerAndPinsTheView) {
  JoinUsual();
  Join(NodeKind::kStore, "store-1");
  const auto grant = Admit(700, 20);
  ASSERT_TRUE(grant.ok()) << grant.status();
  const Ticket& ticket = grant->ticket;
  EXPECT_EQ(grant->address, "prefill-0:1");
  EXPECT_EQ(ticket.prefill_worker, "prefill-0");
  EXPECT_EQ(ticket.decode_worker, "");
  EXPECT_EQ(ticket.epoch, TicketEpoch(1));
  EXPECT_EQ(ticket.model_fingerprint, "f1");
  EXPECT_EQ(ticket.prompt_tokens, 700u);
  EXPECT_EQ(ticket.stores.size(), 2u);
  EXPECT_EQ(ticket.capability, std::string(16, 'c'));
  EXPECT_EQ(ticket.present_by_unix_ms, absl::ToUnixMillis(now_.unix) + 5000);
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kAdmitted);
}

TEST_F(Cluster_, Admit_BadInput_IsRefusedByKind) {
  JoinUsual();
  const auto code = [&](const AdmitRequest& request, const std::string& part) {
    const absl::Status status = cluster_.Admit(now_, request, "c").status();
    EXPECT_TRUE(Contains(status, part)) << status;
    return status.code();
  };
  AdmitRequest good{.model = "smol", .tenant = "", .prompt_tokens = 10, .output_tokens_max = 10,
                    .fidelity = Fidelity::kExact};
  AdmitRequest bad = good;
  bad.model = "gpt";
  EXPECT_EQ(code(bad, "known: smol"), absl::StatusCode::kNotFound);
  bad = good;
  bad.prompt_tokens = 0;
  EXPECT_EQ(code(bad, "empty"), absl::StatusCode::kInvalidArgument);
  bad.prompt_tokens = 1000;
  EXPECT_EQ(code(bad, "beyond the context of smol, 1000"), absl::StatusCode::kInvalidArgument);
  bad.prompt_tokens = UINT32_MAX;
  EXPECT_EQ(code(bad, "4294967295"), absl::StatusCode::kInvalidArgument);
  bad = good;
  bad.output_tokens_max = 991;
  EXPECT_EQ(code(bad, "output_tokens_max"), absl::StatusCode::kInvalidArgument);
  bad.output_tokens_max = UINT32_MAX;
  EXPECT_EQ(code(bad, "output_tokens_max"), absl::StatusCode::kInvalidArgument);
  bad.output_tokens_max = 0;
  EXPECT_EQ(code(bad, "output_tokens_max"), absl::StatusCode::kInvalidArgument);
  bad = good;
  bad.tenant = std::string(1000, 't');
  EXPECT_EQ(code(bad, "tenant"), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(cluster_.counts().refused, 8u);
  EXPECT_EQ(cluster_.counts().admitted, 0u);
  good.output_tokens_max = 990;
  EXPECT_TRUE(cluster_.Admit(now_, good, "c").ok());
}

CoordinatorCoreOptions TenantOptionsForTest() {
  CoordinatorCoreOptions options;
  options.offload_from_tokens = 200;
  options.tenants["fast"] = {Fidelity::kSparse, Fidelity::kSparse};
  options.tenants["careful"] = {Fidelity::kExact, Fidelity::kElastic};
  return options;
}

class TenantCluster : public ClusterFixture {
 protected:
  TenantCluster() : ClusterFixture(TenantOptionsForTest()) {}
  absl::StatusOr<Grant> Ask(const std::string& tenant, std::optional<Fidelity> fidelity,
                            uint32_t prompt = 190, uint32_t output = 11,
                            const std::string& holder = "") {
    return cluster_.Admit(now_,
                          AdmitRequest{.model = "smol", .tenant = tenant, .prompt_tokens = prompt,
                                       .output_tokens_max = output, .fidelity = fidelity,
                                       .holder = holder},
                          "c");
  }
};

TEST_F(TenantCluster, SparseAndLong_WithoutAStore_IsResident) {
  Join(NodeKind::kPrefill, "prefill-0");
  Join(NodeKind::kDecode, "decode-0");
  const auto grant = Ask("", Fidelity::kSparse);
  ASSERT_TRUE(grant.ok()) << grant.status();
  EXPECT_EQ(grant->ticket.request_class, RequestClass::kResident);
}

TEST_F(TenantCluster, SparseAndLong_IsOffloadedThroughPlaceAndRegrant) {
  JoinUsual();
  const auto grant = Ask("", Fidelity::kSparse);
  ASSERT_TRUE(grant.ok()) << grant.status();
  EXPECT_EQ(grant->ticket.fidelity, Fidelity::kSparse);
  EXPECT_EQ(grant->ticket.request_class, RequestClass::kOffloaded);
  EXPECT_EQ(Find(grant->ticket.id).request_class, RequestClass::kOffloaded);
  const auto placed = cluster_.Place(now_, grant->ticket, {});
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->ticket.request_class, RequestClass::kOffloaded);
  const auto again = cluster_.Regrant(now_, placed->ticket, "blocks were lost");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->ticket.request_class, RequestClass::kOffloaded);
  EXPECT_EQ(again->ticket.fidelity, Fidelity::kSparse);
  // Not longer than the bound, or not sparse, or held by a client that computes itself.
  EXPECT_EQ(Ask("", Fidelity::kSparse, 190, 10)->ticket.request_class, RequestClass::kResident);
  EXPECT_EQ(Ask("", Fidelity::kElastic)->ticket.request_class, RequestClass::kResident);
  Join(NodeKind::kClient, "client-0");
  const auto held = Ask("", Fidelity::kSparse, 190, 11, "client-0");
  ASSERT_TRUE(held.ok()) << held.status();
  EXPECT_EQ(held->ticket.request_class, RequestClass::kResident);
}

TEST_F(TenantCluster, FidelityNotNamed_IsTheTenantsAndALooserOneThanItsIsRefused) {
  JoinUsual();
  EXPECT_EQ(Ask("", std::nullopt)->ticket.fidelity, Fidelity::kExact);
  EXPECT_EQ(Ask("careful", std::nullopt)->ticket.fidelity, Fidelity::kExact);
  const auto fast = Ask("fast", std::nullopt);
  ASSERT_TRUE(fast.ok()) << fast.status();
  EXPECT_EQ(fast->ticket.fidelity, Fidelity::kSparse);
  EXPECT_EQ(fast->ticket.request_class, RequestClass::kOffloaded);
  EXPECT_EQ(Ask("fast", Fidelity::kExact)->ticket.fidelity, Fidelity::kExact);
  EXPECT_EQ(Ask("careful", Fidelity::kElastic)->ticket.fidelity, Fidelity::kElastic);
  const absl::Status status = Ask("careful", Fidelity::kSparse).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(Contains(status, "tenant \"careful\" permits elastic at most")) << status;
  EXPECT_EQ(cluster_.counts().refused, 1u);
}

TEST_F(Cluster_, RequestThatNoDecodeWorkerCouldEverHold_IsRefusedAtOnce) {
  Join(NodeKind::kStore, "store-0");
  Join(NodeKind::kPrefill, "prefill-0");
  const uint64_t block = kPlanes * TestModel().geometry.RecordBytes();
  RegisterRequest decode = TestNode(NodeKind::kDecode, "decode-0");
  decode.capacity_bytes = 10 * block;
  ASSERT_TRUE(cluster_.Register(now_, decode).ok());
  alive_["decode-0"] = 1;
  EXPECT_TRUE(Admit(150, 11).ok());  // 161 tokens, the last one's KV is not written: ten blocks
  const absl::Status status = Admit(150, 12).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_TRUE(Contains(status, "decode-0")) << status;
  // A larger worker takes it; without that one it is refused when it is placed, too.
  RegisterRequest large = TestNode(NodeKind::kDecode, "decode-1");
  large.capacity_bytes = 11 * block;
  ASSERT_TRUE(cluster_.Register(now_, large).ok());
  alive_["decode-1"] = 1;
  const auto grant = Admit(150, 12);
  ASSERT_TRUE(grant.ok()) << grant.status();
  alive_.erase("decode-1");
  Run(absl::Seconds(3));
  Report(grant->ticket, "prefill-0", RequestPhase::kPrefill);
  const absl::Status placed = cluster_.Place(now_, grant->ticket, {}).status();
  EXPECT_EQ(placed.code(), absl::StatusCode::kInvalidArgument) << placed;
}

TEST_F(Cluster_, WorkerThatIsStopping_SaysSoAndGetsNothingNew) {
  JoinUsual();
  HeartbeatRequest beat = Beat("decode-0");
  beat.load.draining = true;
  EXPECT_TRUE(cluster_.Heartbeat(now_, beat).drain);
  const auto grant = Admit();
  ASSERT_TRUE(grant.ok()) << grant.status();
  Report(grant->ticket, "prefill-0", RequestPhase::kPrefill);
  const auto placed = cluster_.Place(now_, grant->ticket, {});
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->ticket.decode_worker, "decode-1");
  beat = Beat("prefill-0");
  beat.load.draining = true;
  (void)cluster_.Heartbeat(now_, beat);
  EXPECT_EQ(Admit().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Contains(Admit().status(), "draining")) << Admit().status();
}

TEST_F(Cluster_, NodeThatIsNotWell_IsTold_OnceAndWhenItIsAgain) {
  Join(NodeKind::kStore, "store-0");
  HeartbeatRequest beat = Beat("store-0");
  beat.load.condition = "its disk is full";
  (void)cluster_.Heartbeat(now_, beat);
  const size_t events = cluster_.Status(now_).events.size();
  (void)cluster_.Heartbeat(now_, beat);
  EXPECT_EQ(cluster_.Status(now_).events.size(), events);
  EXPECT_TRUE(HasEvent("store-0 (pid 101): its disk is full"));
  EXPECT_FALSE(HasEvent("well again"));
  beat.load.condition = "";
  (void)cluster_.Heartbeat(now_, beat);
  EXPECT_TRUE(HasEvent("store-0 (pid 101): well again"));
}

TEST_F(Cluster_, Admit_WithoutAStore_IsServedWithoutTheTierAndSaysSo) {
  Join(NodeKind::kPrefill, "prefill-0");
  Join(NodeKind::kDecode, "decode-0");
  const auto grant = Admit();
  ASSERT_TRUE(grant.ok()) << grant.status();
  EXPECT_TRUE(grant->ticket.stores.empty());
  EXPECT_TRUE(Admit().ok());
  EXPECT_TRUE(HasEvent("served without the tier"));
  // What a decode worker lacks cannot come through stores: it may ask again, or compute it.
  Report(grant->ticket, "prefill-0", RequestPhase::kPrefill);
  const auto placed = cluster_.Place(now_, grant->ticket, {});
  ASSERT_TRUE(placed.ok()) << placed.status();
  const auto regrant = cluster_.Regrant(now_, placed->ticket, "blocks are lost");
  EXPECT_TRUE(absl::IsUnavailable(regrant.status())) << regrant.status();
  Join(NodeKind::kStore, "store-0");
  const auto later = Admit();
  ASSERT_TRUE(later.ok()) << later.status();
  EXPECT_EQ(later->ticket.stores.size(), 1u);
  EXPECT_TRUE(HasEvent("use the tier again"));
}

TEST_F(Cluster_, Admit_WithoutOneKindOfNode_NamesIt) {
  EXPECT_EQ(Admit().status().code(), absl::StatusCode::kFailedPrecondition);
  Join(NodeKind::kPrefill, "prefill-0");
  EXPECT_TRUE(Contains(Admit().status(), "no decode worker for model smol")) << Admit().status();
  Join(NodeKind::kDecode, "decode-0");
  Join(NodeKind::kStore, "store-0");
  EXPECT_TRUE(Admit().ok());
  alive_.erase("decode-0");
  Run(absl::Seconds(3));
  EXPECT_EQ(Admit().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Contains(Admit().status(), "decode-0 (pid 101) is dead")) << Admit().status();
  alive_.erase("prefill-0");
  Run(absl::Seconds(3));
  EXPECT_EQ(Admit().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Contains(Admit().status(), "prefill-0 (pid 101) is dead")) << Admit().status();
}

TEST_F(Cluster_, Admit_BeyondTheLimit_IsResourceExhausted) {
  JoinUsual();
  for (int i = 0; i < options_.request_limit; ++i) ASSERT_TRUE(Admit().ok());
  EXPECT_EQ(Admit().status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(Cluster_, Routing_PicksTheLeastLoadedOfBoth) {
  JoinUsual();
  Join(NodeKind::kPrefill, "prefill-1");
  EXPECT_EQ(Admit(900)->ticket.prefill_worker, "prefill-0");
  EXPECT_EQ(Admit(300)->ticket.prefill_worker, "prefill-1");
  EXPECT_EQ(Admit(300)->ticket.prefill_worker, "prefill-1");
  EXPECT_EQ(Admit(300)->ticket.prefill_worker, "prefill-1");
  EXPECT_EQ(Admit(1)->ticket.prefill_worker, "prefill-0");
  std::multiset<std::string> decoders;
  for (int i = 0; i < 6; ++i) decoders.insert(Decoding().decode_worker);
  EXPECT_EQ(decoders.count("decode-0"), 3u);
  EXPECT_EQ(decoders.count("decode-1"), 3u);
}

TEST_F(Cluster_, Routing_LeavesOutDrainingWorkersAndOtherModels) {
  JoinUsual();
  RegisterRequest other = TestNode(NodeKind::kDecode, "another");
  other.model = TestModel("other");
  ASSERT_TRUE(cluster_.Register(now_, other).ok());
  ASSERT_TRUE(cluster_.SetDraining(now_, "decode-0", true).ok());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Decoding().decode_worker, "decode-1");
}

TEST_F(Cluster_, Place_KeepsTheEpochAndSkipsWhoRefused) {
  JoinUsual();
  const Ticket ticket = Admit()->ticket;
  const auto first = cluster_.Place(now_, ticket, {});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->ticket.epoch, ticket.epoch);
  EXPECT_EQ(first->ticket.decode_worker, "decode-0");
  EXPECT_EQ(first->address, "decode-0:1");
  const auto second = cluster_.Place(now_, ticket, {"decode-0"});
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->ticket.decode_worker, "decode-1");
  const auto third = cluster_.Place(now_, ticket, {"decode-0", "decode-1"});
  EXPECT_EQ(third.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Contains(third.status(), "decode-0, decode-1"));
  // The debit of a refused placement is gone: the next request sees decode-0 empty.
  EXPECT_EQ(cluster_.Place(now_, Admit()->ticket, {})->ticket.decode_worker, "decode-0");
}

TEST_F(Cluster_, Regrant_RaisesTheEpochKeepsDecodeAndFencesTheOldTicket) {
  JoinUsual();
  const Ticket ticket = Decoding();
  const auto granted = cluster_.Regrant(now_, ticket, "store-0 lost blocks");
  ASSERT_TRUE(granted.ok()) << granted.status();
  EXPECT_EQ(granted->ticket.epoch, TicketEpoch(2));
  EXPECT_EQ(granted->ticket.decode_worker, ticket.decode_worker);
  EXPECT_EQ(granted->ticket.decode_address, ticket.decode_address);
  EXPECT_EQ(granted->address, "prefill-0:1");
  // Its reply was lost: the same grant again, not a third epoch.
  const auto again = cluster_.Regrant(now_, ticket, "store-0 lost blocks");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->ticket.epoch, TicketEpoch(2));
  // An update of the old epoch changes nothing.
  Report(ticket, ticket.decode_worker, RequestPhase::kFailed, "old");
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kPrefill);
  Report(granted->ticket, ticket.decode_worker, RequestPhase::kDecode);
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kDecode);
  const auto third = cluster_.Regrant(now_, granted->ticket, "again");
  EXPECT_EQ(third->ticket.epoch, TicketEpoch(3));
  EXPECT_EQ(cluster_.Regrant(now_, ticket, "stale").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cluster_.Place(now_, ticket, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(Cluster_, TicketNotPresentedInTime_Fails) {
  JoinUsual();
  const Ticket ticket = Admit()->ticket;
  Run(absl::Milliseconds(4900));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kAdmitted);
  Run(absl::Milliseconds(200));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kFailed);
  EXPECT_NE(Find(ticket.id).error.find("not presented to prefill-0 within 5s"), std::string::npos)
      << Find(ticket.id).error;
}

TEST_F(Cluster_, TicketListedByItsPrefillWorker_CountsAsPresented) {
  JoinUsual();
  const Ticket ticket = Admit()->ticket;
  held_["prefill-0"] = {{ticket.id, ticket.epoch}};
  Run(absl::Seconds(20));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kPrefill);
}

TEST_F(Cluster_, TicketThatItsHolderLost_FailsAfterTheBound) {
  JoinUsual();
  const Ticket ticket = Decoding();
  held_[ticket.decode_worker] = {{ticket.id, ticket.epoch}};
  Run(absl::Minutes(2));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kDecode);
  held_.clear();
  Run(absl::Seconds(29));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kDecode);
  Run(absl::Seconds(2));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kFailed);
}

TEST_F(Cluster_, DecodeWorkerDeath_FailsItsRequestsOnlyAndTellsEveryNode) {
  JoinUsual();
  std::vector<Ticket> tickets;
  for (int i = 0; i < 4; ++i) tickets.push_back(Decoding());
  alive_.erase("decode-1");
  Run(absl::Milliseconds(2200));
  std::vector<TicketId> dead;
  for (const Ticket& ticket : tickets) {
    const RequestStatus request = Find(ticket.id);
    if (ticket.decode_worker == "decode-0") {
      EXPECT_EQ(request.phase, RequestPhase::kDecode);
    } else {
      EXPECT_EQ(request.phase, RequestPhase::kFailed);
      EXPECT_NE(request.error.find("decode worker decode-1 (pid 101) died: no heartbeat"),
                std::string::npos)
          << request.error;
      dead.push_back(ticket.id);
    }
  }
  ASSERT_EQ(dead.size(), 2u);
  EXPECT_TRUE(HasEvent("decode-1 (pid 101) declared dead: no heartbeat for 2.0 s; 2 requests failed"));
  for (const char* node : {"store-0", "prefill-0"}) {
    const std::vector<TicketId> told = cluster_.Heartbeat(now_, Beat(node)).cancelled;
    EXPECT_EQ(std::set<TicketId>(told.begin(), told.end()),
              std::set<TicketId>(dead.begin(), dead.end()))
        << node;
  }
  EXPECT_TRUE(cluster_.Heartbeat(now_, Beat("decode-0")).cancelled.empty());
  // A worker that was only cut off and comes back still lists them: told, however late.
  Run(absl::Seconds(10));
  Join(NodeKind::kDecode, "decode-1");
  held_["decode-1"] = {{dead[0], TicketEpoch(1)}, {dead[1], TicketEpoch(1)}};
  EXPECT_EQ(cluster_.Heartbeat(now_, Beat("decode-1")).cancelled.size(), 2u);
}

TEST_F(Cluster_, PrefillWorkerDeath_FailsWhatItHeldAndSparesWhatDecodes) {
  JoinUsual();
  const Ticket decoding = Decoding();
  const Ticket waiting = Admit()->ticket;
  const Ticket computing = Admit()->ticket;
  Report(computing, "prefill-0", RequestPhase::kPrefill);
  alive_.erase("prefill-0");
  Run(absl::Milliseconds(2200));
  EXPECT_EQ(Find(decoding.id).phase, RequestPhase::kDecode);
  EXPECT_EQ(Find(waiting.id).phase, RequestPhase::kFailed);
  EXPECT_EQ(Find(computing.id).phase, RequestPhase::kFailed);
}

TEST_F(Cluster_, DecodeDeathDuringHandOver_LeavesPrefillTimeToPlaceAgain) {
  JoinUsual();
  const Ticket ticket = Admit()->ticket;
  Report(ticket, "prefill-0", RequestPhase::kPrefill);
  ASSERT_EQ(cluster_.Place(now_, ticket, {})->ticket.decode_worker, "decode-0");
  const Ticket other = Admit()->ticket;
  Report(other, "prefill-0", RequestPhase::kPrefill);
  ASSERT_EQ(cluster_.Place(now_, other, {"decode-1"})->ticket.decode_worker, "decode-0");
  alive_.erase("decode-0");
  Run(absl::Milliseconds(2200));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kHandOver);
  ASSERT_EQ(cluster_.Place(now_, ticket, {"decode-0"})->ticket.decode_worker, "decode-1");
  Run(absl::Seconds(6));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kHandOver);
  EXPECT_EQ(Find(other.id).phase, RequestPhase::kFailed);
  EXPECT_NE(Find(other.id).error.find("decode-0"), std::string::npos);
}

TEST_F(Cluster_, StoreDeath_FailsNoRequest) {
  JoinUsual();
  Join(NodeKind::kStore, "store-1");
  const Ticket ticket = Decoding();
  held_[ticket.decode_worker] = {{ticket.id, ticket.epoch}};
  alive_.erase("store-1");
  Run(absl::Seconds(3));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kDecode);
  EXPECT_EQ(cluster_.View().stores.size(), 1u);
  EXPECT_EQ(cluster_.Regrant(now_, ticket, "store-1 died")->ticket.stores.size(), 1u);
}

TEST_F(Cluster_, Cancel_NeedsTheCapabilityAndIsIdempotent) {
  JoinUsual();
  const Ticket ticket = Decoding();
  EXPECT_EQ(cluster_.Cancel(now_, ticket.id, "wrong").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(cluster_.Cancel(now_, TicketId(1), "x").code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(cluster_.Cancel(now_, ticket.id, ticket.capability).ok());
  EXPECT_TRUE(cluster_.Cancel(now_, ticket.id, ticket.capability).ok());
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kCancelled);
  EXPECT_EQ(cluster_.counts().cancelled, 1u);
  EXPECT_EQ(cluster_.Heartbeat(now_, Beat(ticket.decode_worker)).cancelled,
            std::vector<TicketId>{ticket.id});
  Run(kEndNoticeFor + absl::Seconds(1));
  EXPECT_TRUE(cluster_.Heartbeat(now_, Beat(ticket.decode_worker)).cancelled.empty());
}

TEST_F(Cluster_, FinalPhase_StaysWhateverIsReported) {
  JoinUsual();
  const Ticket ticket = Decoding();
  Report(ticket, ticket.decode_worker, RequestPhase::kDone);
  for (const RequestPhase phase :
       {RequestPhase::kPrefill, RequestPhase::kFailed, RequestPhase::kCancelled}) {
    Report(ticket, ticket.decode_worker, phase, "late");
    EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kDone);
  }
  EXPECT_EQ(cluster_.Place(now_, ticket, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cluster_.Regrant(now_, ticket, "x").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(Cluster_, UpdateFromANodeThatDoesNotHoldTheTicket_ChangesNothing) {
  JoinUsual();
  const Ticket ticket = Decoding();
  const std::string other = ticket.decode_worker == "decode-0" ? "decode-1" : "decode-0";
  Report(ticket, other, RequestPhase::kFailed, "not yours");
  Report(ticket, "prefill-0", RequestPhase::kFailed, "not yours any more");
  Report(ticket, "", RequestPhase::kFailed, "nobody's");
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kDecode);
}

TEST_F(Cluster_, TicketOfAnotherBootOfTheCoordinator_IsAdopted) {
  JoinUsual();
  Ticket ticket = Decoding();
  ticket.id = TicketId((uint64_t{options_.ticket_boot} + 1) << 40 | 5);
  const auto granted = cluster_.Regrant(now_, ticket, "lost");
  ASSERT_TRUE(granted.ok()) << granted.status();
  EXPECT_EQ(granted->ticket.epoch, TicketEpoch(2));
  EXPECT_EQ(Find(ticket.id).phase, RequestPhase::kPrefill);
}

TEST_F(Cluster_, History_IsBoundedAndForgottenTicketsAreOver) {
  JoinUsual();
  const Ticket first = Decoding();
  Report(first, first.decode_worker, RequestPhase::kDone);
  for (size_t i = 0; i < kRequestHistoryMax; ++i) {
    const Ticket ticket = Decoding();
    Report(ticket, ticket.decode_worker, RequestPhase::kDone);
  }
  EXPECT_EQ(cluster_.Requests(now_).size(), kRequestHistoryMax);
  EXPECT_EQ(cluster_.counts().done, kRequestHistoryMax + 1);
  const absl::Status replay = cluster_.Place(now_, first, {}).status();
  EXPECT_EQ(replay.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Contains(replay, "is over")) << replay;
}

TEST_F(Cluster_, Events_AreBoundedAndGivenOnce) {
  for (size_t i = 0; i < kEventsMax + 50; ++i) {
    Join(NodeKind::kStore, absl::StrCat("store-", i));
  }
  EXPECT_EQ(cluster_.Status(now_).events.size(), kEventsMax);
  EXPECT_EQ(cluster_.TakeNewEvents().size(), kEventsMax);
  EXPECT_TRUE(cluster_.TakeNewEvents().empty());
}

TEST_F(Cluster_, Models_ShowTheSmallestContextOfTheirWorkers) {
  JoinUsual();
  RegisterRequest small = TestNode(NodeKind::kDecode, "decode-7");
  small.model.context_tokens_max = 500;
  ASSERT_TRUE(cluster_.Register(now_, small).ok());
  ASSERT_EQ(cluster_.Models().size(), 1u);
  EXPECT_EQ(cluster_.Models()[0].context_tokens_max, 500u);
  EXPECT_EQ(Admit(499, 2).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(Cluster_, Client_IsGivenItsOwnTicketWithoutAnyWorker) {
  Join(NodeKind::kStore, "store-0");
  RegisterRequest client = TestNode(NodeKind::kClient, "client-0");
  client.control_address.clear();
  client.model = TestModel("own");
  ASSERT_TRUE(cluster_.Register(now_, client).ok());
  AdmitRequest request{.model = "own", .tenant = "t", .prompt_tokens = 100,
                       .output_tokens_max = 10, .fidelity = Fidelity::kExact,
                       .holder = "client-0"};
  const auto grant = cluster_.Admit(now_, request, std::string(16, 'c'));
  ASSERT_TRUE(grant.ok()) << grant.status();
  EXPECT_EQ(grant->ticket.prefill_worker, "client-0");
  EXPECT_EQ(grant->ticket.model_fingerprint, client.model.fingerprint);
  EXPECT_EQ(grant->ticket.stores.size(), 1u);
  EXPECT_EQ(grant->address, "");
  EXPECT_TRUE(cluster_.Models().empty());  // a client serves nobody
  Report(grant->ticket, "client-0", RequestPhase::kDone);
  EXPECT_EQ(Find(grant->ticket.id).phase, RequestPhase::kDone);

  request.model = "smol";
  EXPECT_EQ(cluster_.Admit(now_, request, "c").status().code(),
            absl::StatusCode::kInvalidArgument);
  request.holder = "store-0";
  EXPECT_EQ(cluster_.Admit(now_, request, "c").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(Cluster_, ClientThatDies_FailsWhatItHeld) {
  JoinUsual();
  Join(NodeKind::kClient, "client-0");
  const AdmitRequest request{.model = "smol", .tenant = "", .prompt_tokens = 16,
                             .output_tokens_max = 1, .fidelity = Fidelity::kExact,
                             .holder = "client-0"};
  const auto grant = cluster_.Admit(now_, request, std::string(16, 'c'));
  ASSERT_TRUE(grant.ok()) << grant.status();
  held_["client-0"] = {TicketRef{grant->ticket.id, grant->ticket.epoch}};
  Run(absl::Seconds(1));
  EXPECT_EQ(Find(grant->ticket.id).phase, RequestPhase::kPrefill);
  const auto routed = Admit();  // never to the client
  ASSERT_TRUE(routed.ok());
  EXPECT_EQ(routed->ticket.prefill_worker, "prefill-0");
  alive_.erase("client-0");
  Run(absl::Seconds(3));
  EXPECT_EQ(Find(grant->ticket.id).phase, RequestPhase::kFailed);
  EXPECT_TRUE(cluster_.Admit(now_, request, "c").status().message().find("dead") !=
              std::string::npos);
}

}  // namespace
}  // namespace kvt
