// Pulls of blocks that a store has on disk alone: brought back by few calls, in slices, and pulled;
// lost when there is no room, when it takes too long, when the store goes; never in anyone's way.
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/contract/tier_fixture.h"

namespace kvt {
namespace {

constexpr int kBlocks = 24;

class TierDiskTest : public TierTest {
 protected:
  // Writes a sequence and looks it up again; the blocks' places.
  void Prepare(int stores, int blocks) {
    StartStores(stores);
    for (auto& store : stores_) store->PlayDisk();
    worker_ = StartConnected("decode-0", FastOptions());
    ticket_ = NewTicket(View());
    sequence_ = std::make_unique<SequenceBlocks>(Sequence(blocks));
    written_ = std::make_unique<TestSlots>(TestGeometry(), blocks);
    written_->Fill(31);
    Write(*worker_, ticket_, *sequence_, *written_);
    read_ = std::make_unique<TestSlots>(TestGeometry(), blocks);
    places_ = worker_->tier().Lookup(ticket_, sequence_->blocks()).blocks;
  }
  DiskFront& DiskOf(const PlacedBlock& block) {
    return Store(worker_->tier().StoreName(block.store)).disk();
  }
  void SpillAll() {
    for (const PlacedBlock& block : places_) DiskOf(block).Spill(block.place);
  }
  void ExpectAllRead() {
    for (int i = 0; i < static_cast<int>(places_.size()); ++i) {
      ASSERT_TRUE(read_->SameBlock(*written_, i, i)) << i;
    }
  }
  // Starts a pull of all blocks.
  TransferId StartPull(TransferWaiter& waiter, absl::Time deadline = absl::InfiniteFuture()) {
    list_.clear();
    for (size_t i = 0; i < places_.size(); ++i) {
      const int block = static_cast<int>(i);
      list_.push_back({ticket_.ref(), &places_[i], read_->Addresses(block, Plane::kBase),
                       read_->Addresses(block, Plane::kResidual)});
    }
    outcomes_.assign(places_.size(), TransferOutcome::kSkipped);
    return worker_->tier().Pull({.blocks = list_,
                                 .layer_begin = 0,
                                 .layer_end = TestGeometry().layers,
                                 .outcomes = absl::MakeSpan(outcomes_),
                                 .deadline = deadline,
                                 .done = waiter.Done()});
  }

  HeldTicket ticket_;
  std::unique_ptr<SequenceBlocks> sequence_;
  std::unique_ptr<TestSlots> written_;
  std::unique_ptr<TestSlots> read_;
  std::vector<PlacedBlock> places_;
  std::vector<PullBlock> list_;
  std::vector<TransferOutcome> outcomes_;
  std::unique_ptr<TierWorker> worker_;  // goes first
};

TEST_P(TierDiskTest, AllOnDisk_OneCallPerStoreThenPulledAndSaidSo) {
  Prepare(2, kLongBlocks);
  SpillAll();
  const TransferResult result = worker_->PullAll(ticket_.ref(), places_, *read_);
  EXPECT_EQ(result.blocks_ok, kLongBlocks);
  EXPECT_EQ(result.blocks_from_disk, kLongBlocks);
  EXPECT_EQ(result.bytes, written_->bytes());
  EXPECT_EQ(result.bytes_from_disk, written_->bytes());
  ExpectAllRead();
  for (auto& store : stores_) {
    EXPECT_EQ(store->disk().promotes(), 1) << store->name();
    const StoreLinkFigures figures = FiguresOf(*worker_, store->name());
    EXPECT_EQ(figures.promote_calls, 1u);
    EXPECT_EQ(figures.disk_bytes, figures.pulled_bytes);
    EXPECT_EQ(figures.lost_pieces, 0u);
  }
  // Now they are in memory.
  const TransferResult again = worker_->PullAll(ticket_.ref(), places_, *read_);
  EXPECT_EQ(again.blocks_ok, kLongBlocks);
  EXPECT_EQ(again.blocks_from_disk, 0);
  EXPECT_EQ(again.bytes_from_disk, 0u);
}

TEST_P(TierDiskTest, SomePlanesOnDisk_OnlyThoseCount) {
  Prepare(1, kBlocks);
  for (int i = 0; i < 4; ++i) DiskOf(places_[i]).Spill(places_[i].place, false, true);
  DiskOf(places_[9]).Spill(places_[9].place);
  const TransferResult result = worker_->PullAll(ticket_.ref(), places_, *read_);
  EXPECT_EQ(result.blocks_ok, kBlocks);
  EXPECT_EQ(result.blocks_from_disk, 5);
  EXPECT_EQ(result.bytes, written_->bytes());
  EXPECT_EQ(result.bytes_from_disk, written_->bytes() / kBlocks / 2 * 6);
  ExpectAllRead();
}

TEST_P(TierDiskTest, DiskThatIsSlow_IsPulledInSlices) {
  Prepare(1, kBlocks);
  SpillAll();
  stores_[0]->disk().SetAnswer(DiskFront::Answer::kReadHalf);
  const TransferResult result = worker_->PullAll(ticket_.ref(), places_, *read_);
  EXPECT_EQ(result.blocks_ok, kBlocks);
  EXPECT_EQ(result.blocks_from_disk, kBlocks);
  EXPECT_EQ(result.bytes_from_disk, written_->bytes());
  EXPECT_GT(stores_[0]->disk().promotes(), 3);
  ExpectAllRead();
  EXPECT_GT(worker_->tier().Rates(places_[0].store).disk, 0);
}

TEST_P(TierDiskTest, NoRoomOrGone_AreLostAndTheOthersArrive) {
  for (const auto answer : {DiskFront::Answer::kNoRoom, DiskFront::Answer::kLost}) {
    stores_.clear();
    worker_.reset();
    Prepare(1, kBlocks);
    for (int i = 0; i < 6; ++i) DiskOf(places_[i]).Spill(places_[i].place, true, i < 3);
    stores_[0]->disk().SetAnswer(answer);
    std::vector<TransferOutcome> outcomes;
    const TransferResult result =
        worker_->PullAll(ticket_.ref(), places_, *read_, &outcomes);
    EXPECT_EQ(result.blocks_ok, kBlocks - 6);
    EXPECT_EQ(result.blocks_lost, 6);
    EXPECT_EQ(result.blocks_from_disk, 0);
    for (int i = 0; i < kBlocks; ++i) {
      EXPECT_EQ(outcomes[i], i < 6 ? TransferOutcome::kLost : TransferOutcome::kOk) << i;
    }
    EXPECT_EQ(FiguresOf(*worker_, "store-0").lost_pieces, 9u);
    worker_.reset();
  }
}

TEST_P(TierDiskTest, SpilledAgainEachTime_EndsAsLost) {
  Prepare(1, kBlocks);
  SpillAll();
  stores_[0]->disk().SetAnswer(DiskFront::Answer::kRespill);
  const TransferResult result = worker_->PullAll(ticket_.ref(), places_, *read_);
  EXPECT_EQ(result.blocks_lost, kBlocks);
  EXPECT_EQ(stores_[0]->disk().promotes(), 3);
}

TEST_P(TierDiskTest, Cancel_WhileTheDiskIsRead_EndsSoon) {
  Prepare(1, kBlocks);
  for (int i = 0; i < 6; ++i) DiskOf(places_[i]).Spill(places_[i].place);
  stores_[0]->disk().SetAnswer(DiskFront::Answer::kLate);
  TransferWaiter waiter;
  const TransferId id = StartPull(waiter);
  ASSERT_TRUE(Eventually([&] { return stores_[0]->disk().promotes() > 0; }));
  const absl::Time cancelled = RealClock::Get().Now();
  worker_->tier().Cancel(id);
  const TransferResult result = waiter.Wait();
  EXPECT_LT(RealClock::Get().Now() - cancelled, absl::Seconds(2));
  EXPECT_EQ(result.blocks_lost, 6);
  EXPECT_EQ(result.blocks_ok, kBlocks - 6);
}

TEST_P(TierDiskTest, Deadline_WhileTheDiskIsRead_IsKept) {
  Prepare(1, kBlocks);
  SpillAll();
  stores_[0]->disk().SetAnswer(DiskFront::Answer::kLate);
  TransferWaiter waiter;
  const absl::Time began = RealClock::Get().Now();
  StartPull(waiter, began + absl::Milliseconds(500));
  EXPECT_EQ(waiter.Wait().blocks_lost, kBlocks);
  EXPECT_LT(RealClock::Get().Now() - began, absl::Seconds(3));
}

TEST_P(TierDiskTest, StoreThatGoesWhileItsDiskIsRead_LosesThoseAlone) {
  Prepare(2, kLongBlocks);
  SpillAll();
  for (auto& store : stores_) store->disk().SetAnswer(DiskFront::Answer::kLate);
  TransferWaiter waiter;
  StartPull(waiter);
  ASSERT_TRUE(Eventually([&] {
    return stores_[0]->disk().promotes() > 0 && stores_[1]->disk().promotes() > 0;
  }));
  stores_[0]->gate().SetFailure(absl::UnavailableError("cut off"));
  stores_[1]->disk().SetAnswer(DiskFront::Answer::kRead);
  const TransferResult result = waiter.Wait();
  int at_first = 0;
  for (const PlacedBlock& block : places_) {
    at_first += worker_->tier().StoreName(block.store) == "store-0" ? 1 : 0;
  }
  EXPECT_EQ(result.blocks_lost, at_first);
  EXPECT_EQ(result.blocks_ok, kLongBlocks - at_first);
  EXPECT_EQ(result.blocks_from_disk, kLongBlocks - at_first);
}

TEST_P(TierDiskTest, ManyPullsThatWaitForADisk_LeaveThreadsForOtherCalls) {
  Prepare(1, kBlocks);
  SpillAll();
  stores_[0]->disk().SetAnswer(DiskFront::Answer::kLate);
  constexpr int kPulls = 40;
  std::vector<PullBlock> list(kPulls);
  std::vector<TransferOutcome> outcomes(kPulls);
  std::vector<TransferWaiter> waiters(kPulls);
  TestSlots slots(TestGeometry(), kPulls);
  for (int i = 0; i < kPulls; ++i) {
    list[i] = {ticket_.ref(), &places_[i % kBlocks], slots.Addresses(i, Plane::kBase),
               slots.Addresses(i, Plane::kResidual)};
    worker_->tier().Pull({.blocks = absl::MakeSpan(list).subspan(i, 1),
                          .layer_begin = 0,
                          .layer_end = TestGeometry().layers,
                          .outcomes = absl::MakeSpan(outcomes).subspan(i, 1),
                          .done = waiters[i].Done()});
  }
  ASSERT_TRUE(Eventually([&] { return stores_[0]->disk().promotes() > 2; }));
  const absl::Time asked = RealClock::Get().Now();
  EXPECT_EQ(worker_->tier().Lookup(ticket_, sequence_->blocks()).exact_blocks, kBlocks);
  EXPECT_LT(RealClock::Get().Now() - asked, absl::Seconds(1));
  EXPECT_LE(stores_[0]->disk().promotes_at_once_max(), FastOptions().control_threads / 2);
  stores_[0]->disk().SetAnswer(DiskFront::Answer::kRead);
  for (int i = 0; i < kPulls; ++i) {
    EXPECT_EQ(waiters[i].Wait().blocks_from_disk, 1) << i;
    EXPECT_TRUE(slots.SameBlock(*written_, i, i % kBlocks)) << i;
  }
}

TEST_P(TierDiskTest, ClientThatCloses_WhileADiskIsRead_EndsItsPulls) {
  Prepare(1, kBlocks);
  SpillAll();
  stores_[0]->disk().SetAnswer(DiskFront::Answer::kLate);
  TransferWaiter waiter;
  StartPull(waiter);
  ASSERT_TRUE(Eventually([&] { return stores_[0]->disk().promotes() > 0; }));
  worker_.reset();
  EXPECT_TRUE(waiter.IsDone());
}

INSTANTIATE_TEST_SUITE_P(Planes, TierDiskTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
