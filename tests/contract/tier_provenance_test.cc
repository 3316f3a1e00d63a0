// Provenance in the tier, with real keys and stores: what was computed sparse is its request's alone
// while that lives, then anyone's who permits sparse, and never an exact request's.
#include <memory>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "tests/contract/tier_fixture.h"

namespace kvt {
namespace {

constexpr int kExact = 3;  // blocks of the prompt
constexpr int kAll = 8;    // with what was decoded sparse

class TierProvenanceTest : public TierTest {
 protected:
  void SetUp() override {
    StartStores(2);
    writer_ = StartConnected("writer", FastOptions());
    reader_ = StartConnected("reader", FastOptions());
  }
  HeldTicket TicketOf(Fidelity fidelity) {
    HeldTicket held = NewTicket(View());
    held.ticket.fidelity = fidelity;
    held.signed_ticket = signer_->Sign(held.ticket);
    return held;
  }
  static std::vector<int32_t> Tokens() {
    std::vector<int32_t> tokens(kAll * kBlockTokens);
    std::iota(tokens.begin(), tokens.end(), 7);
    return tokens;
  }
  // As a request names its blocks whose answer is decoded at `answer`.
  static SequenceBlocks Names(const HeldTicket& ticket, Provenance answer) {
    const std::vector<int32_t> tokens = Tokens();
    SequenceBlocks names(TestChain(), ticket.ticket.id);
    names.Append(absl::MakeConstSpan(tokens).first(kExact * kBlockTokens));
    names.Append(absl::MakeConstSpan(tokens).subspan(kExact * kBlockTokens), answer);
    return names;
  }
  static int Found(TierWorker& worker, const HeldTicket& ticket, const SequenceBlocks& names) {
    return worker.tier().Lookup(ticket, names.blocks()).exact_blocks;
  }
  // Waits until the background release has reached the stores.
  void Release(TierWorker& worker, const HeldTicket& ticket) {
    worker.tier().Release(ticket.ref());
    EXPECT_TRUE(Eventually([&] { return Tickets() == 0; }));
  }
  uint64_t Tickets() {
    uint64_t tickets = 0;
    for (auto& store : stores_) tickets += store->Stats().tickets;
    return tickets;
  }

  std::unique_ptr<TierWorker> writer_;
  std::unique_ptr<TierWorker> reader_;
};

TEST_P(TierProvenanceTest, SparseBlocks_AreReusedBySparseRequestsAndNeverByOthers) {
  const HeldTicket first = TicketOf(Fidelity::kSparse);
  TestSlots written(TestGeometry(), kAll);
  written.Fill(11);
  Write(*writer_, first, Names(first, Provenance::kSparse), written);
  Release(*writer_, first);

  const HeldTicket exact = TicketOf(Fidelity::kExact);
  EXPECT_EQ(Found(*reader_, exact, Names(exact, Provenance::kExact)), kExact)
      << "its own names lead to the prompt's blocks only";
  // Should it ask for the others, the stores answer nothing.
  EXPECT_EQ(Found(*reader_, exact, Names(exact, Provenance::kSparse)), 0);
  const HeldTicket elastic = TicketOf(Fidelity::kElastic);
  EXPECT_EQ(Found(*reader_, elastic, Names(elastic, Provenance::kSparse)), 0);
  EXPECT_EQ(Found(*reader_, elastic, Names(elastic, Provenance::kBase)), kExact);

  const HeldTicket sparse = TicketOf(Fidelity::kSparse);
  const LookupResult found =
      reader_->tier().Lookup(sparse, Names(sparse, Provenance::kSparse).blocks());
  ASSERT_EQ(found.exact_blocks, kAll);
  TestSlots read(TestGeometry(), kAll);
  ASSERT_EQ(reader_->PullAll(sparse.ref(), found.blocks, read).blocks_ok, kAll);
  for (int b = 0; b < kAll; ++b) EXPECT_TRUE(read.SameBlock(written, b, b)) << b;
  for (const HeldTicket& ticket : {exact, elastic, sparse}) reader_->tier().Release(ticket.ref());
}

TEST_P(TierProvenanceTest, SparseBlocks_WhileTheirRequestLives_AreItsAlone) {
  const HeldTicket first = TicketOf(Fidelity::kSparse);
  TestSlots written(TestGeometry(), kAll);
  written.Fill(21);
  Write(*writer_, first, Names(first, Provenance::kSparse), written);
  const HeldTicket second = TicketOf(Fidelity::kSparse);
  EXPECT_EQ(Found(*reader_, second, Names(second, Provenance::kSparse)), kExact);
  // Its decode worker, on another session, finds them.
  EXPECT_EQ(Found(*reader_, first, Names(first, Provenance::kSparse)), kAll);
  // The second computes the same tokens, to other bytes; each reads its own.
  constexpr int kOwn = kAll - kExact;
  const SequenceBlocks names = Names(second, Provenance::kSparse);
  auto reserved = reader_->tier().Reserve(second, names.blocks(), 0, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  for (int b = 0; b < kAll; ++b) EXPECT_EQ(reserved->already_sealed[b], b < kExact) << b;
  std::vector<PlacedBlock> own(reserved->blocks.begin() + kExact, reserved->blocks.end());
  TestSlots others(TestGeometry(), kOwn);
  others.Fill(22);
  ASSERT_EQ(reader_->PushLayers(second.ref(), own, others).blocks_ok, kOwn);
  for (const SealOutcome outcome : reader_->SealAll(second.ref(), own)) {
    EXPECT_EQ(outcome, SealOutcome::kSealed);
  }
  const LookupResult firsts =
      reader_->tier().Lookup(first, Names(first, Provenance::kSparse).blocks());
  ASSERT_EQ(firsts.exact_blocks, kAll);
  TestSlots read(TestGeometry(), kAll);
  ASSERT_EQ(reader_->PullAll(first.ref(), firsts.blocks, read).blocks_ok, kAll);
  for (int b = 0; b < kAll; ++b) EXPECT_TRUE(read.SameBlock(written, b, b)) << b;
  const LookupResult seconds = reader_->tier().Lookup(second, names.blocks());
  ASSERT_EQ(seconds.exact_blocks, kAll);
  ASSERT_EQ(reader_->PullAll(second.ref(), seconds.blocks, read).blocks_ok, kAll);
  for (int b = 0; b < kAll; ++b) {
    EXPECT_TRUE(b < kExact ? read.SameBlock(written, b, b) : read.SameBlock(others, b, b - kExact))
        << b;
  }
  // The first ends, and its blocks are the ones that are published.
  writer_->tier().Release(first.ref());
  reader_->tier().Release(first.ref());
  reader_->tier().Release(second.ref());
  ASSERT_TRUE(Eventually([&] { return Tickets() == 0; }));
  const HeldTicket third = TicketOf(Fidelity::kSparse);
  const LookupResult found =
      writer_->tier().Lookup(third, Names(third, Provenance::kSparse).blocks());
  ASSERT_EQ(found.exact_blocks, kAll);
  ASSERT_EQ(writer_->PullAll(third.ref(), found.blocks, read).blocks_ok, kAll);
  for (int b = 0; b < kAll; ++b) EXPECT_TRUE(read.SameBlock(written, b, b)) << b;
  writer_->tier().Release(third.ref());
}

INSTANTIATE_TEST_SUITE_P(Planes, TierProvenanceTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
