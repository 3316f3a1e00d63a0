// Workers and stores of other wire versions, and writers and readers that disagree on what the bytes
// are: refused when they connect, both sides named (F12).
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/contract/tier_fixture.h"

namespace kvt {
namespace {

constexpr uint32_t kNow = kWireVersion;
constexpr uint32_t kBefore = kNow - 1;
static_assert(kWireVersionMin == kBefore);

class TierVersionTest : public TierTest {
 protected:
  // A worker and a store that claim those versions serve each other.
  void ExpectServes(WireVersionRange worker_versions, WireVersionRange store_versions) {
    TestStoreOptions options;
    options.versions = store_versions;
    stores_.clear();
    StartStores(1, options);
    auto worker = StartWorker("decode-0", FastOptions(), worker_versions);
    worker->tier().SetView(View());
    const absl::Status connected = worker->tier().WaitConnected(absl::Seconds(20));
    ASSERT_TRUE(connected.ok()) << connected;
    const HeldTicket ticket = NewTicket(View());
    const SequenceBlocks sequence = Sequence(3);
    TestSlots written(TestGeometry(), 3);
    written.Fill(21);
    Write(*worker, ticket, sequence, written);
    const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
    TestSlots read(TestGeometry(), 3);
    EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, read).blocks_ok, 3);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(read.SameBlock(written, i, i));
  }

  absl::Status Refusal(WireVersionRange worker_versions, WireVersionRange store_versions) {
    TestStoreOptions options;
    options.versions = store_versions;
    stores_.clear();
    StartStores(1, options);
    auto worker = StartWorker("decode-0", FastOptions(), worker_versions);
    worker->tier().SetView(View());
    EXPECT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-0").failures > 0; }));
    EXPECT_EQ(stores_[0]->Stats().sessions, 0u);
    return worker->tier().WaitConnected(absl::ZeroDuration());
  }
};
INSTANTIATE_TEST_SUITE_P(Planes, TierVersionTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

TEST_P(TierVersionTest, F12_WorkerOrStoreOfTheVersionBefore_ServesAndIsServed) {
  ExpectServes({kBefore, kBefore}, {});
  ExpectServes({}, {kBefore, kBefore});
}

TEST_P(TierVersionTest, F12_NewerPeerWhoseRangeOverlaps_IsSpokenToInOurVersion) {
  ExpectServes({kNow, kNow + 1}, {});
  ExpectServes({}, {kNow, kNow + 1});
}

TEST_P(TierVersionTest, F12_VersionOutOfRange_IsRefusedNamingBothSides) {
  const std::string newer = absl::StrCat(kNow + 1, " to ", kNow + 2);
  const std::string ours = absl::StrCat(kBefore, " to ", kNow);
  const absl::Status worker = Refusal({kNow + 1, kNow + 2}, {});
  EXPECT_TRUE(absl::StrContains(worker.message(), absl::StrCat("decode-0 speaks ", newer))) << worker;
  EXPECT_TRUE(absl::StrContains(worker.message(), absl::StrCat("store-0 ", ours))) << worker;
  const absl::Status store = Refusal({}, {kNow + 1, kNow + 2});
  EXPECT_TRUE(absl::StrContains(store.message(), absl::StrCat("decode-0 speaks ", ours))) << store;
  EXPECT_TRUE(absl::StrContains(store.message(), absl::StrCat("store-0 ", newer))) << store;
}

// Element type and kernels stand in the numerics id, the weights in the fingerprint.
TEST_P(TierVersionTest, F12_TicketOfAnotherModelOrNumerics_IsRefusedWithBothFingerprints) {
  StartStores(1);
  auto worker = StartConnected("decode-0", FastOptions());
  const SequenceBlocks sequence = Sequence(2);
  const auto refuse = [&](auto change) {
    HeldTicket ticket = NewTicket(View());
    change(ticket.ticket);
    ticket.signed_ticket = signer_->Sign(ticket.ticket);
    EXPECT_EQ(worker->tier().Lookup(ticket, sequence.blocks()).base_blocks, 0);
    const auto reserved =
        worker->tier().Reserve(ticket, sequence.blocks(), 0, ReserveMode::kAllOrNothing);
    EXPECT_TRUE(absl::IsFailedPrecondition(reserved.status())) << reserved.status();
    return std::string(reserved.status().message());
  };
  std::string text = refuse([](Ticket& ticket) { ticket.model_fingerprint = "beef"; });
  EXPECT_TRUE(absl::StrContains(text, "beef") && absl::StrContains(text, "f00d")) << text;
  text = refuse([](Ticket& ticket) { ticket.numerics_id = "bf16/other"; });
  EXPECT_TRUE(absl::StrContains(text, "bf16/other") && absl::StrContains(text, "n1")) << text;
  EXPECT_EQ(stores_[0]->Stats().pins, 0u);
  EXPECT_EQ(stores_[0]->Stats().used_bytes, 0u);
}

}  // namespace
}  // namespace kvt
