// The decode engine with requests of the offloaded class over real stores: admission, misses,
// write-back, provenance, and what happens when a store is full or lost, or a request is cancelled.
#include "tests/contract/offloaded_engine_fixture.h"

namespace kvt {
namespace {

TEST_F(OffloadedEngineTest, Sparse_WithDigestsAndFirstSelection_EqualsTheReferenceAndPullsAPart) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  HandOverRequest request = Request(ticket, prompt_, next);
  request.selections = first_selection_;
  request.calibration_id = calibration_.Id();
  ASSERT_TRUE(HandOver(ticket, request).ok());
  prefill_tier_->tier().Release(ticket.ref());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.finish, FinishReason::kLength);
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
  const DecodeFigures& f = answer.figures;
  EXPECT_TRUE(f.offloaded);
  EXPECT_EQ(f.sequence_bytes, 50 * f.block_bytes);
  // Sink and 8 recent blocks, 8 selected ones, 41 digests.
  EXPECT_EQ(f.digest_bytes, 41u * layout_->BlockBytes());
  EXPECT_LE(f.admission_bytes, (9 + 8) * f.block_bytes + f.digest_bytes);
  EXPECT_GE(f.admission_bytes, (9 + 7) * f.block_bytes + f.digest_bytes);
  EXPECT_EQ(f.computed.exact, 0u);
  EXPECT_EQ(f.computed.sparse, static_cast<uint64_t>(kOutput - 1));
  EXPECT_EQ(f.sparse_steps, static_cast<uint64_t>(kOutput - 1));
  EXPECT_GT(f.hot_misses, 0u);
  EXPECT_LT(f.hot_misses, f.selected_blocks);
  EXPECT_GT(f.write_back_bytes, 0u);
}

TEST_F(OffloadedEngineTest, NoDigestsNoSelection_MakesThemFromPlanesForItselfAndTheNext) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, false);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
  EXPECT_EQ(answer.figures.digest_bytes, 0u);
  EXPECT_EQ(answer.figures.admission_bytes, answer.figures.sequence_bytes);
  ASSERT_TRUE(Eventually([this] { return engine_->Idle(); }));
  const HeldTicket second = NewTicket(2);
  ASSERT_TRUE(HandOver(second, Request(second, prompt_, next)).ok());
  const Answer again = Read(second.ticket.id);
  ASSERT_TRUE(again.status.ok()) << again.status;
  EXPECT_EQ(again.tokens, answer.tokens);
  EXPECT_EQ(again.figures.digest_bytes, 41u * layout_->BlockBytes());
  EXPECT_LT(again.figures.admission_bytes, again.figures.sequence_bytes / 2);
  prefill_tier_->tier().Release(ticket.ref());
}

// The answer's blocks go to the tier with their digests: a dialogue that goes on makes none.
TEST_F(OffloadedEngineTest, CompletedBlocks_LeaveTheirDigestsInTheTier) {
  Start({.tokens = 4096, .hot_factor = 1, .fetch_share = 1});  // exact, so that others may read them
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  ASSERT_TRUE(Eventually([this] { return engine_->Idle(); }));
  std::vector<int32_t> dialogue = prompt_;
  dialogue.insert(dialogue.end(), answer.tokens.begin(), answer.tokens.end());
  SequenceBlocks names(KeyChain(layout_->Domain(domain_)), TicketId(2));
  names.Append(dialogue);
  const HeldTicket reader = NewTicket(2);
  const LookupResult found = prefill_digest_tier_->tier().Lookup(reader, names.blocks());
  // All but the last block, whose digest would have been made by a further step.
  EXPECT_GE(found.exact_blocks, static_cast<int>(names.blocks().size()) - 1);
  prefill_digest_tier_->tier().Release(reader.ref());
  prefill_tier_->tier().Release(ticket.ref());
}

// A dialogue begins resident and goes on offloaded: the digests of the answer were made when its blocks
// were written back.
TEST_F(OffloadedEngineTest, ResidentAnswer_LeavesItsDigestsForTheOffloadedRequestThatFollows) {
  output_ = 260;
  Start(Sparse());
  HeldTicket first = NewTicket(1);
  first.ticket.request_class = RequestClass::kResident;
  first.signed_ticket = signer_->Sign(first.ticket);
  const int32_t next = Prefill(first, prompt_, true);
  ASSERT_TRUE(HandOver(first, Request(first, prompt_, next)).ok());
  const Answer answer = Read(first.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_FALSE(answer.figures.offloaded);
  ASSERT_TRUE(Eventually([this] { return engine_->Idle(); }));
  EXPECT_EQ(Metric("kvtide_decode_digests_written_total"), (260 - 1) / kBlockTokens);
  // The next turn, without what a prefill worker would write beside it.
  std::vector<int32_t> dialogue = prompt_;
  dialogue.insert(dialogue.end(), answer.tokens.begin(), answer.tokens.end() - 1);
  dialogue.resize(dialogue.size() / kBlockTokens * kBlockTokens);  // no tail, which was private
  output_ = 20;
  HeldTicket second = NewTicket(2);
  second.ticket.prompt_tokens = static_cast<uint32_t>(dialogue.size());
  second.signed_ticket = signer_->Sign(second.ticket);
  HandOverRequest request = Request(second, dialogue, answer.tokens.back());
  request.prompt_tokens = second.ticket.prompt_tokens;
  ASSERT_TRUE(HandOver(second, request).ok());
  const Answer again = Read(second.ticket.id);
  ASSERT_TRUE(again.status.ok()) << again.status;
  EXPECT_TRUE(again.figures.offloaded);
  const MiddleBlocks middle = MiddleOf(static_cast<int>(dialogue.size()));
  EXPECT_EQ(again.figures.digest_bytes,
            static_cast<uint64_t>(middle.count()) * layout_->BlockBytes());
  EXPECT_EQ(Metric("kvtide_decode_digests_made_total"), 0);
  // The sink and the recent blocks alone: no plane was pulled for a digest.
  const auto blocks = static_cast<int>(dialogue.size()) / kBlockTokens;
  EXPECT_EQ(again.figures.admission_bytes,
            static_cast<uint64_t>(blocks - middle.count()) * again.figures.block_bytes +
                again.figures.digest_bytes);
  prefill_tier_->tier().Release(first.ref());
}

// Its dialogue will not go on offloaded.
TEST_F(OffloadedEngineTest, ResidentAnswerOfAnExactTicket_MakesNoDigests) {
  Start(Sparse());
  HeldTicket ticket = NewTicket(1);
  ticket.ticket.request_class = RequestClass::kResident;
  ticket.ticket.fidelity = Fidelity::kExact;
  ticket.signed_ticket = signer_->Sign(ticket.ticket);
  const int32_t next = Prefill(ticket, prompt_, false);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  EXPECT_TRUE(Read(ticket.ticket.id).status.ok());
  ASSERT_TRUE(Eventually([this] { return engine_->Idle(); }));
  EXPECT_EQ(Metric("kvtide_decode_digests_written_total"), 0);
  prefill_tier_->tier().Release(ticket.ref());
}

TEST_F(OffloadedEngineTest, BudgetOfEverything_EqualsFullAttentionAndIsExact) {
  const OffloadBudget everything{.tokens = 4096, .hot_factor = 1, .fetch_share = 1};
  Start(everything);
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  prefill_tier_->tier().Release(ticket.ref());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedFull(next));
  EXPECT_EQ(answer.figures.computed.exact, static_cast<uint64_t>(kOutput - 1));
  EXPECT_EQ(answer.figures.computed.sparse, 0u);
  EXPECT_EQ(answer.figures.sparse_steps, 0u);
  EXPECT_GT(answer.figures.hot_misses, 0u);
}

TEST_F(OffloadedEngineTest, SelectionsOfNonsense_AreIgnored) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  HandOverRequest request = Request(ticket, prompt_, next);
  request.calibration_id = calibration_.Id();
  request.selections = {{-5, 0, 3, 3, 2, 70000, 7}, {49, 48, 1}};
  ASSERT_TRUE(HandOver(ticket, request).ok());
  prefill_tier_->tier().Release(ticket.ref());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
}

TEST_F(OffloadedEngineTest, Cancel_WhileItSteps_NothingStays) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  prefill_tier_->tier().Release(ticket.ref());
  size_t seen = 0;
  const Answer answer = Read(ticket.ticket.id, [&](const TokenEvent& event) {
    seen += event.tokens.size();
    if (seen >= 3 && event.finish == FinishReason::kRunning) {
      (void)engine_->Cancel(ticket.ticket.id, kCapability);
    }
    return true;
  });
  EXPECT_TRUE(answer.finish == FinishReason::kCancelled || answer.finish == FinishReason::kLength);
  // The destructor checks slots, pins and reservations.
}

TEST_F(OffloadedEngineTest, Cancel_WhileItLoads_NothingStays) {
  Start(Sparse());
  int32_t next = 0;
  for (uint64_t id = 1; id <= 8; ++id) {
    const HeldTicket ticket = NewTicket(id);
    if (id == 1) next = Prefill(ticket, prompt_, false);  // digests are made window by window
    const auto pulled = [this] {
      return stores_[0]->Stats().pulled_bytes + stores_[1]->Stats().pulled_bytes;
    };
    const uint64_t wanted = pulled() + (id - 1) * 100'000;  // at another point each
    ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
    (void)Eventually([&] { return pulled() >= wanted; }, absl::Milliseconds(500));
    (void)engine_->Cancel(ticket.ticket.id, kCapability);
    EXPECT_TRUE(Eventually([this] { return engine_->Idle(); }));
    if (id == 1) prefill_tier_->tier().Release(ticket.ref());
  }
}

TEST_F(OffloadedEngineTest, WorkerWithoutCalibration_ServesTheRequestResident) {
  Start(Sparse(), 2, 64 * kMiB, 2000, /*calibrated=*/false);
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  HandOverRequest request = Request(ticket, prompt_, next);
  request.selections = first_selection_;
  request.calibration_id = calibration_.Id();
  ASSERT_TRUE(HandOver(ticket, request).ok());
  prefill_tier_->tier().Release(ticket.ref());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedFull(next));
  EXPECT_FALSE(answer.figures.offloaded);
}

TEST_F(OffloadedEngineTest, TwoAndAResidentOne_StepInTurnAndEachIsAsAlone) {
  Start(Sparse());
  std::vector<HeldTicket> tickets = {NewTicket(1), NewTicket(2), NewTicket(3)};
  tickets[2].ticket.request_class = RequestClass::kResident;
  tickets[2].signed_ticket = signer_->Sign(tickets[2].ticket);
  int32_t next = 0;
  for (const HeldTicket& ticket : tickets) next = Prefill(ticket, prompt_, true);
  for (const HeldTicket& ticket : tickets) {
    ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
    prefill_tier_->tier().Release(ticket.ref());
  }
  const std::vector<int32_t> sparse = ExpectedSparse(next, Sparse());
  for (size_t i = 0; i < tickets.size(); ++i) {
    const Answer answer = Read(tickets[i].ticket.id);
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.tokens, i < 2 ? sparse : ExpectedFull(next)) << i;
    EXPECT_EQ(answer.figures.offloaded, i < 2);
  }
  // Of a layer and step one for the whole batch.
  const double pulls = Metric("kvtide_decode_step_pulls_total");
  EXPECT_GT(pulls, 0);
  EXPECT_LE(pulls, Metric("kvtide_decode_offloaded_steps_total") * layers_);
}

TEST_F(OffloadedEngineTest, DigestsOfOneRequestFit_TheSecondIsRefusedUntilTheFirstHasEnded) {
  const int blocks = BlocksFor(static_cast<uint64_t>(kPrompt + kOutput));
  const uint64_t one = DigestBuffer::BytesFor(calibration_.DigestBytesByLayer(), blocks);
  options_.digest_bytes = one + one / 2;
  Start(Sparse());
  const HeldTicket first = NewTicket(1), second = NewTicket(2);
  const int32_t next = Prefill(first, prompt_, true);
  for (auto& store : stores_) store->faults()->SetStalled(true);  // the first stays where it is
  ASSERT_TRUE(HandOver(first, Request(first, prompt_, next)).ok());
  const absl::Status refused = HandOver(second, Request(second, prompt_, next));
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_NE(refused.message().find("[decode] digest_bytes"), std::string::npos) << refused;
  EXPECT_TRUE(Eventually([&] {
    return Metric("kvtide_decode_digest_bytes") == static_cast<double>(one);
  }));
  EXPECT_EQ(Metric("kvtide_decode_digest_bytes_max"), static_cast<double>(one + one / 2));
  EXPECT_EQ(Metric("kvtide_decode_refused_requests_total"), 1);
  // One that is not of the class needs none.
  HeldTicket resident = NewTicket(3);
  resident.ticket.request_class = RequestClass::kResident;
  resident.signed_ticket = signer_->Sign(resident.ticket);
  EXPECT_TRUE(HandOver(resident, Request(resident, prompt_, next)).ok());
  for (auto& store : stores_) store->faults()->SetStalled(false);
  EXPECT_TRUE(Read(first.ticket.id).status.ok());
  EXPECT_TRUE(Eventually([&] { return Metric("kvtide_decode_digest_bytes") == 0; }));
  EXPECT_TRUE(HandOver(second, Request(second, prompt_, next)).ok());
  EXPECT_TRUE(Read(second.ticket.id).status.ok());
  EXPECT_TRUE(Read(resident.ticket.id).status.ok());
  prefill_tier_->tier().Release(first.ref());
}

TEST_F(OffloadedEngineTest, CompletedBlocksThatNoStoreTakes_StayOnTheDevice) {
  output_ = 260;  // 16 blocks, more than are set aside
  Start(Sparse(), 1, 2 * kMiB);
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, false);  // digests would be evicted for the answer
  FillStores();
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  const Answer answer = Read(ticket.ticket.id);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
  EXPECT_EQ(answer.figures.write_back_bytes, 0u);
  EmptyStores();
  prefill_tier_->tier().Release(ticket.ref());
}

TEST_F(OffloadedEngineTest, StoreHasRoomAgain_TakesTheBlocksItRefused) {
  output_ = 1100;
  Start(Sparse(), 1, 2 * kMiB);
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, false);
  FillStores();
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  std::atomic<size_t> tokens{0};
  auto reader = std::async(std::launch::async, [&] {
    return Read(ticket.ticket.id, [&](const TokenEvent& event) {
      tokens += event.tokens.size();
      return true;
    });
  });
  EXPECT_TRUE(Eventually([&] { return tokens >= 40; }));  // two blocks were refused
  const uint64_t before = stores_[0]->Stats().pushed_bytes;
  EmptyStores();
  // Those two and the one completed next.
  const uint64_t block_bytes = 2 * model_.geometry.RecordBytes();
  EXPECT_TRUE(Eventually([&] { return stores_[0]->Stats().pushed_bytes >= before + 3 * block_bytes; }));
  (void)engine_->Cancel(ticket.ticket.id, kCapability);
  const Answer answer = reader.get();
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  prefill_tier_->tier().Release(ticket.ref());
}

TEST_F(OffloadedEngineTest, NoStoreTakesBlocksAndTheDeviceIsFull_RequestFailsAndSaysSo) {
  output_ = 260;
  const int blocks = BlocksFor(static_cast<uint64_t>(kPrompt + output_));
  const uint64_t slots = ShapeFor(calibration_, Sparse(), blocks).Slots();
  Start(Sparse(), 1, 2 * kMiB, static_cast<uint32_t>(slots) + 3);  // no further block fits
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, false);  // digests would be evicted for the answer
  FillStores();
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  const Answer answer = Read(ticket.ticket.id);
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable) << answer.status;
  EXPECT_NE(answer.status.message().find("no device memory"), std::string::npos) << answer.status;
  EXPECT_GT(answer.tokens.size(), 64u);
  EmptyStores();
  prefill_tier_->tier().Release(ticket.ref());
}

TEST_F(OffloadedEngineTest, MissArrivesCorrupt_IsPulledOnceMoreAndNothingIsComputedAgain) {
  int32_t next = 0;
  const Answer answer = AnswerDisturbed(&next, [](LoopbackFaults& faults) { faults.CorruptNext(1); });
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
  EXPECT_GT(Metric("kvtide_decode_misses_retried_total"), 0);
  EXPECT_EQ(Metric("kvtide_decode_resumed_requests_total"), 0);
  EXPECT_EQ(Metric("kvtide_decode_lost_blocks_total"), 0);
  EXPECT_FALSE(was_resumed_);
}

TEST_F(OffloadedEngineTest, LinksBreakUnderAMiss_RequestWaitsForThemAndGoesOn) {
  transfer_timeout_ = absl::Seconds(1);  // a burst that is swallowed closes its channel then
  int32_t next = 0;
  const Answer answer = AnswerDisturbed(&next, [](LoopbackFaults& faults) { faults.DropNext(1); });
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens, ExpectedSparse(next, Sparse()));
  EXPECT_GT(Metric("kvtide_decode_misses_retried_total"), 0);
  EXPECT_FALSE(was_resumed_);
}

// Everything stored is lost while the request loads or steps. Prefill computes it again, or, when the
// stores cannot be reached at that moment, decode does; on a slow machine the request may have ended.
TEST_F(OffloadedEngineTest, StoresRestartEmpty_RequestIsComputedAgainAndEndsWell) {
  Start(Sparse());
  const HeldTicket ticket = NewTicket(1);
  const int32_t next = Prefill(ticket, prompt_, true);
  const HeldTicket again = NewTicket(1, 2);
  coordinator_.regrant_reply.ticket = again.signed_ticket;
  coordinator_.regrant_reply.prefill_address = "prefill";
  std::future<ResumeRequest> resumed = resumed_.get_future();
  ASSERT_TRUE(HandOver(ticket, Request(ticket, prompt_, next)).ok());
  prefill_tier_->tier().Release(ticket.ref());
  auto reader = std::async(std::launch::async, [&] { return Read(ticket.ticket.id); });
  for (auto& store : stores_) store->Restart();
  view_.version = 2;
  view_.stores.clear();
  for (auto& store : stores_) view_.stores.push_back(store->ref());
  const std::vector<TierWorker*> tiers = {tier_.get(), digest_tier_.get(), prefill_tier_.get(),
                                          prefill_digest_tier_.get()};
  for (TierWorker* tier : tiers) tier->tier().SetView(view_);
  const auto is_ready = [](const auto& future) {
    return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  EXPECT_TRUE(Eventually([&] { return is_ready(resumed) || is_ready(reader); }));
  const bool sent_back = is_ready(resumed);
  if (sent_back) {
    const ResumeRequest request = resumed.get();
    for (TierWorker* tier : tiers) EXPECT_TRUE(tier->tier().WaitConnected(absl::Seconds(20)).ok());
    const int32_t token = Prefill(again, request.tokens, true);
    const absl::Status status = HandOver(again, Request(again, request.tokens, token));
    EXPECT_TRUE(status.ok()) << status;
    prefill_tier_->tier().Release(again.ref());
  }
  const Answer answer = reader.get();
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.tokens.size(), static_cast<size_t>(kOutput));
  EXPECT_EQ(answer.tokens[0], next);
  EXPECT_EQ(answer.figures.recomputed_suffixes, sent_back ? 1u : 0u);
}

}  // namespace
}  // namespace kvt
