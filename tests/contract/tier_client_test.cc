// TierClient against real stores in this process: their index and arena, control by their own
// interface (through a gate that can fail), bytes over loopback, UCX on lo, and shared memory.
#include "kvstore/client/tier_client.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/log.h"
#include "kvstore/client/placement.h"
#include "tests/support/test_store.h"
#include "tests/support/tier_worker.h"

namespace kvt {
namespace {

constexpr char kSecret[] = "0123456789abcdef0123456789abcdef";

ModelInfo TestModel() {
  ModelInfo model;
  model.name = "test";
  model.fingerprint = "f00d";
  model.numerics_id = "n1";
  model.geometry = TestGeometry();
  return model;
}

KeyChain TestChain() {
  KeyDomain domain;
  domain.cluster_secret = kSecret;
  domain.model_fingerprint = TestModel().fingerprint;
  domain.numerics_id = TestModel().numerics_id;
  domain.geometry = TestGeometry();
  return KeyChain(domain);
}

class TierClientTest : public ::testing::TestWithParam<TestPlane> {
 protected:
  void StartStores(int count, TestStoreOptions options = {}) {
    options.plane = GetParam();
    for (int i = 0; i < count; ++i) {
      const std::string name = absl::StrCat("store-", stores_.size());
      stores_.push_back(std::make_unique<TestStore>(name, options, signer_->PublicKey()));
    }
  }

  ClientOptions FastOptions() {
    ClientOptions options;
    options.transport =
        GetParam() == TestPlane::kShm ? TierTransport::kShm : TierTransport::kUcx;
    options.breaker_pause = absl::Milliseconds(20);
    options.breaker_pause_max = absl::Milliseconds(100);
    options.lookup_timeout = absl::Seconds(10);
    options.control_timeout = absl::Seconds(10);
    options.transfer_timeout = absl::Seconds(10);
    return options;
  }

  std::unique_ptr<TierWorker> StartWorker(const std::string& name, ClientOptions options) {
    TierClientConfig config;
    config.worker = name;
    config.worker_epoch = BootEpoch(++boots_);
    config.model = model_;
    config.options = options;
    config.transports = {transport_.get()};
    config.connect_store = [this](const std::string& address) -> std::shared_ptr<StoreApi> {
      return std::shared_ptr<StoreApi>(&Store(address).gate(), [](StoreApi*) {});
    };
    return std::make_unique<TierWorker>(std::move(config), RealClock::Get());
  }
  std::unique_ptr<TierWorker> StartConnected(const std::string& name, ClientOptions options) {
    std::unique_ptr<TierWorker> worker = StartWorker(name, options);
    worker->tier().SetView(View());
    const absl::Status status = worker->tier().WaitConnected(absl::Seconds(20));
    EXPECT_TRUE(status.ok()) << status;
    return worker;
  }

  TestStore& Store(const std::string& name) {
    for (auto& store : stores_) {
      if (store->name() == name) return *store;
    }
    ADD_FAILURE() << "no store " << name;
    return *stores_[0];
  }

  // All stores, or the first `count`.
  ClusterView View(int count = -1) {
    ClusterView view;
    view.version = ++views_;
    for (size_t i = 0; i < (count < 0 ? stores_.size() : count); ++i) {
      view.stores.push_back(stores_[i]->ref());
    }
    return view;
  }

  HeldTicket NewTicket(const ClusterView& view) {
    HeldTicket held;
    held.ticket.id = TicketId(++tickets_);
    held.ticket.epoch = TicketEpoch(1);
    held.ticket.model = model_.name;
    held.ticket.model_fingerprint = model_.fingerprint;
    held.ticket.numerics_id = model_.numerics_id;
    held.ticket.stores = view.stores;
    held.ticket.prompt_tokens = 1000;
    held.ticket.output_tokens_max = 100;
    held.ticket.present_by_unix_ms = absl::ToUnixMillis(absl::Now()) + 60'000;
    held.signed_ticket = signer_->Sign(held.ticket);
    return held;
  }

  SequenceBlocks Sequence(int blocks, int32_t first = 1, TicketId ticket = TicketId(1)) {
    std::vector<int32_t> tokens(static_cast<size_t>(blocks) * kBlockTokens);
    std::iota(tokens.begin(), tokens.end(), first);
    SequenceBlocks sequence(TestChain(), ticket);
    sequence.Append(tokens);
    return sequence;
  }

  // Reserves, pushes layer by layer, seals; every step must succeed.
  void Write(TierWorker& worker, const HeldTicket& ticket, const SequenceBlocks& sequence,
             const TestSlots& slots) {
    auto reserved = worker.tier().Reserve(ticket, sequence.blocks(), 0, ReserveMode::kAllOrNothing);
    ASSERT_TRUE(reserved.ok()) << reserved.status();
    const TransferResult pushed = worker.PushLayers(ticket.ref(), reserved->blocks, slots);
    ASSERT_EQ(pushed.blocks_ok, static_cast<int>(sequence.blocks().size()));
    EXPECT_EQ(pushed.bytes, slots.bytes());
    for (const SealOutcome outcome : worker.SealAll(ticket.ref(), reserved->blocks)) {
      ASSERT_EQ(outcome, SealOutcome::kSealed);
    }
  }

  uint64_t Pins() {
    uint64_t pins = 0;
    for (auto& store : stores_) pins += store->Stats().pins;
    return pins;
  }

  StoreLinkFigures FiguresOf(TierWorker& worker, const std::string& name) {
    for (const StoreLinkFigures& f : worker.tier().Figures()) {
      if (f.name == name) return f;
    }
    return {};
  }

  // Index of the store that owns the group of a block, and one block index for each store.
  static int OwnerIndex(const TierBlock& block, const ClusterView& view) {
    return OwnerOf(block.group_key, view.stores);
  }

  ModelInfo model_ = TestModel();
  std::unique_ptr<TicketSigner> signer_ = TicketSigner::Generate();
  std::unique_ptr<Transport> transport_ = MakeTestTransport(GetParam());
  std::vector<std::unique_ptr<TestStore>> stores_;
  uint64_t views_ = 0;
  uint64_t tickets_ = 100;
  uint64_t boots_ = 0;
};

// Long enough for five groups: both of two stores own some (checked where it matters).
constexpr int kLongBlocks = kFirstGroupBlocks + 4 * kGroupBlocks;

TEST_P(TierClientTest, PushedBlocks_ByAnotherWorker_AreFoundAndPulledBitByBit) {
  StartStores(2);
  auto prefill = StartConnected("prefill-0", FastOptions());
  auto decode = StartConnected("decode-0", FastOptions());
  const ClusterView view = View();
  const HeldTicket ticket = NewTicket(view);
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(3);
  Write(*prefill, ticket, sequence, written);

  const LookupResult found = decode->tier().Lookup(ticket, sequence.blocks());
  EXPECT_EQ(found.exact_blocks, kLongBlocks);
  EXPECT_EQ(found.base_blocks, kLongBlocks);
  EXPECT_TRUE(found.unreachable.empty());
  TestSlots read(TestGeometry(), kLongBlocks);
  const TransferResult pulled = decode->PullAll(ticket.ref(), found.blocks, read);
  EXPECT_EQ(pulled.blocks_ok, kLongBlocks);
  EXPECT_EQ(pulled.bytes, written.bytes());
  EXPECT_EQ(pulled.bursts, 2u);  // one per store
  for (int i = 0; i < kLongBlocks; ++i) ASSERT_TRUE(read.SameBlock(written, i, i)) << i;

  for (int i = 0; i < 2; ++i) EXPECT_GT(stores_[i]->Stats().blocks, 0u) << i;
  EXPECT_EQ(Pins(), 2u * kLongBlocks);
  prefill->tier().Release(ticket.ref());
  decode->tier().Release(ticket.ref());
  EXPECT_TRUE(Eventually([&] { return Pins() == 0; }));
}

TEST_P(TierClientTest, Pull_OfALayerRange_TouchesThatRangeOnly) {
  StartStores(1);
  auto worker = StartConnected("prefill-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots written(TestGeometry(), 4);
  written.Fill(5);
  Write(*worker, ticket, sequence, written);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  TestSlots read(TestGeometry(), 4);
  TestSlots untouched(TestGeometry(), 4);
  const TransferResult first = worker->PullAll(ticket.ref(), found.blocks, read, nullptr, 1, 2);
  EXPECT_EQ(first.bytes, written.bytes() / 3);
  for (int layer = 0; layer < 3; ++layer) {
    const TestSlots& want = layer == 1 ? written : untouched;
    const size_t bytes = TestGeometry().SlotBytes();
    EXPECT_EQ(std::memcmp(*read.Addresses(2, Plane::kResidual, layer),
                     *want.Addresses(2, Plane::kResidual, layer), bytes), 0) << layer;
  }
  worker->PullAll(ticket.ref(), found.blocks, read, nullptr, 0, 1);
  worker->PullAll(ticket.ref(), found.blocks, read, nullptr, 2, 3);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(read.SameBlock(written, i, i));
}

TEST_P(TierClientTest, BlocksNotSealed_AreAbsent) {
  StartStores(2);
  auto worker = StartConnected("prefill-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(8);
  auto reserved = worker->tier().Reserve(ticket, sequence.blocks(), 0, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  for (const SealOutcome outcome : worker->SealAll(ticket.ref(), reserved->blocks)) {
    EXPECT_EQ(outcome, SealOutcome::kIncomplete);
  }
  const HeldTicket other = NewTicket(View());
  EXPECT_EQ(worker->tier().Lookup(other, sequence.blocks()).base_blocks, 0);
}

TEST_P(TierClientTest, StoreKilledMidPull_LosesItsBlocksOnly) {
  if (GetParam() != TestPlane::kLoopback) GTEST_SKIP() << "faults are injected in loopback";
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const ClusterView view = View();
  const HeldTicket ticket = NewTicket(view);
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(7);
  Write(*worker, ticket, sequence, written);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  ASSERT_EQ(found.exact_blocks, kLongBlocks);

  stores_[1]->faults()->SetStalled(true);
  TestSlots read(TestGeometry(), kLongBlocks);
  std::vector<PullBlock> list;
  for (int i = 0; i < kLongBlocks; ++i) {
    list.push_back({ticket.ref(), &found.blocks[i], read.Addresses(i, Plane::kBase),
                    read.Addresses(i, Plane::kResidual)});
  }
  std::vector<TransferOutcome> outcomes(kLongBlocks);
  TransferWaiter waiter;
  TierPull pull;
  pull.blocks = list;
  pull.layer_end = TestGeometry().layers;
  pull.outcomes = absl::MakeSpan(outcomes);
  pull.done = waiter.Done();
  worker->tier().Pull(std::move(pull));
  EXPECT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-0").pull_bursts > 0; }));
  EXPECT_FALSE(waiter.IsDone());
  stores_[1]->Kill();
  const TransferResult result = waiter.Wait();

  int lost = 0;
  for (int i = 0; i < kLongBlocks; ++i) {
    const bool dead = OwnerIndex(sequence.blocks()[i], view) == 1;
    EXPECT_EQ(outcomes[i], dead ? TransferOutcome::kLost : TransferOutcome::kOk) << i;
    EXPECT_TRUE(dead || read.SameBlock(written, i, i)) << i;
    lost += dead;
  }
  EXPECT_GT(lost, 0);
  EXPECT_EQ(result.blocks_lost, lost);
  // From then on it counts as absent, at once, and what it owned is written to the next in order.
  const LookupResult again = worker->tier().Lookup(NewTicket(view), sequence.blocks());
  EXPECT_EQ(again.unreachable, std::vector<NodeName>{"store-1"});
  const HeldTicket later = NewTicket(view);
  const SequenceBlocks more = Sequence(kLongBlocks, 50'000);
  TestSlots other(TestGeometry(), kLongBlocks);
  other.Fill(8);
  Write(*worker, later, more, other);
  EXPECT_EQ(worker->tier().Lookup(later, more.blocks()).exact_blocks, kLongBlocks);
}

TEST_P(TierClientTest, StoreRestarted_OldPlacesAreLostAndANewSessionServes) {
  StartStores(1);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(8);
  TestSlots written(TestGeometry(), 8);
  written.Fill(9);
  Write(*worker, ticket, sequence, written);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  ASSERT_EQ(found.exact_blocks, 8);

  stores_[0]->Restart();
  worker->tier().SetView(View());
  ASSERT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-0").sessions_opened == 2; }));
  ASSERT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
  TestSlots read(TestGeometry(), 8);
  const TransferResult stale = worker->PullAll(ticket.ref(), found.blocks, read);
  EXPECT_EQ(stale.blocks_lost, 8);
  EXPECT_EQ(stale.bursts, 0u);
  // The same ticket looks up, finds nothing, writes again and reads.
  EXPECT_EQ(worker->tier().Lookup(ticket, sequence.blocks()).base_blocks, 0);
  Write(*worker, ticket, sequence, written);
  const LookupResult fresh = worker->tier().Lookup(ticket, sequence.blocks());
  EXPECT_EQ(worker->PullAll(ticket.ref(), fresh.blocks, read).blocks_ok, 8);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(read.SameBlock(written, i, i));
  // Stale places stay lost, although handles of the new boot may equal old ones.
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, read).blocks_lost, 8);
}

TEST_P(TierClientTest, SessionEndedAtTheStore_IsReopenedWithoutAViewChange) {
  StartStores(1);
  auto worker = StartConnected("decode-0", FastOptions());
  const ClusterView view = View();
  stores_[0]->Restart();
  // Whatever is called first meets NotFound or a dead channel; soon a new session serves.
  const SequenceBlocks sequence = Sequence(2);
  TestSlots slots(TestGeometry(), 2);
  ASSERT_TRUE(Eventually([&] {
    (void)worker->tier().Lookup(NewTicket(view), sequence.blocks());
    return FiguresOf(*worker, "store-0").sessions_opened == 2 &&
           worker->tier().WaitConnected(absl::ZeroDuration()).ok();
  }));
  Write(*worker, NewTicket(view), sequence, slots);
}

TEST_P(TierClientTest, StoreThatFails_IsSkippedByTheBreakerAndProbed) {
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const ClusterView view = View();
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  Write(*worker, NewTicket(view), sequence, written);

  stores_[1]->gate().SetFailure(absl::UnavailableError("cut off"));
  ASSERT_TRUE(Eventually([&] {
    (void)worker->tier().Lookup(NewTicket(view), sequence.blocks());
    return FiguresOf(*worker, "store-1").state != "up";
  }));
  EXPECT_EQ(FiguresOf(*worker, "store-1").breaker_opened, 1u);
  const LookupResult without = worker->tier().Lookup(NewTicket(view), sequence.blocks());
  EXPECT_EQ(without.unreachable, std::vector<NodeName>{"store-1"});
  int present = 0;
  for (int i = 0; i < kLongBlocks; ++i) {
    const bool cut_off = OwnerIndex(sequence.blocks()[i], view) == 1;
    EXPECT_EQ(without.blocks[i].has_residual(), !cut_off) << i;
    present += !cut_off;
  }
  EXPECT_GT(present, 0);
  // The session survives: pins and blocks are where they were.
  stores_[1]->gate().SetFailure(absl::OkStatus());
  ASSERT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-1").state == "up"; }));
  EXPECT_EQ(FiguresOf(*worker, "store-1").sessions_opened, 1u);
  EXPECT_EQ(worker->tier().Lookup(NewTicket(view), sequence.blocks()).exact_blocks, kLongBlocks);
}

TEST_P(TierClientTest, SlowStore_DoesNotHoldUpLookupBeyondItsTimeout) {
  StartStores(2);
  ClientOptions options = FastOptions();
  options.lookup_timeout = absl::Milliseconds(200);
  options.breaker_failures = 100;
  auto worker = StartConnected("decode-0", options);
  const ClusterView view = View();
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  Write(*worker, NewTicket(view), sequence, written);
  stores_[0]->gate().SetDelay(absl::Seconds(20));
  const absl::Time start = RealClock::Get().Now();
  const LookupResult found = worker->tier().Lookup(NewTicket(view), sequence.blocks());
  EXPECT_LT(RealClock::Get().Now() - start, absl::Seconds(5));
  EXPECT_EQ(found.unreachable, std::vector<NodeName>{"store-0"});
  for (int i = 0; i < kLongBlocks; ++i) {
    EXPECT_EQ(found.blocks[i].has_base(), OwnerIndex(sequence.blocks()[i], view) == 1) << i;
  }
  stores_[0]->gate().SetDelay(absl::ZeroDuration());
}

TEST_P(TierClientTest, FlippedByte_IsLostWithChecksumsAndDeliveredWithout) {
  StartStores(1);
  auto careful = StartConnected("decode-0", FastOptions());
  ClientOptions off = FastOptions();
  off.verify_checksums = false;
  auto careless = StartConnected("decode-1", off);
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots written(TestGeometry(), 4);
  written.Fill(11);
  Write(*careful, ticket, sequence, written);
  const LookupResult found = careful->tier().Lookup(ticket, sequence.blocks());
  const LookupResult same = careless->tier().Lookup(ticket, sequence.blocks());
  ASSERT_EQ(found.exact_blocks, 4);
  ASSERT_EQ(same.exact_blocks, 4);
  stores_[0]->FlipByte(found.blocks[2].place, Plane::kBase, TestGeometry().SliceOffset(1, 1) + 5);

  TestSlots read(TestGeometry(), 4);
  std::vector<TransferOutcome> outcomes;
  careful->PullAll(ticket.ref(), found.blocks, read, &outcomes);
  EXPECT_EQ(outcomes[2], TransferOutcome::kLost);
  for (const int i : {0, 1, 3}) {
    EXPECT_EQ(outcomes[i], TransferOutcome::kOk);
    EXPECT_TRUE(read.SameBlock(written, i, i));
  }
  EXPECT_EQ(FiguresOf(*careful, "store-0").corrupt_pieces, 1u);
  careless->PullAll(ticket.ref(), same.blocks, read, &outcomes);
  EXPECT_EQ(outcomes[2], TransferOutcome::kOk);
  EXPECT_FALSE(read.SameBlock(written, 2, 2));
}

TEST_P(TierClientTest, ViewChange_LookupAsksThePreviousOwnerToo) {
  StartStores(3);
  auto worker = StartWorker("decode-0", FastOptions());
  const ClusterView one = View(1);
  worker->tier().SetView(one);
  ASSERT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(13);
  Write(*worker, NewTicket(one), sequence, written);

  const ClusterView three = View();
  worker->tier().SetView(three);
  ASSERT_TRUE(worker->tier().WaitConnected(absl::Seconds(20)).ok());
  int moved = 0;
  for (const TierBlock& block : sequence.blocks()) moved += OwnerIndex(block, three) != 0;
  ASSERT_GT(moved, 0);
  const HeldTicket ticket = NewTicket(three);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  EXPECT_EQ(found.exact_blocks, kLongBlocks);
  TestSlots read(TestGeometry(), kLongBlocks);
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, read).blocks_ok, kLongBlocks);
  for (int i = 0; i < kLongBlocks; ++i) ASSERT_TRUE(read.SameBlock(written, i, i));
}

TEST_P(TierClientTest, Reserve_WithoutRoomInOneStore_LetsEverythingGo) {
  TestStoreOptions small;
  small.arena_bytes = 2 * kMiB;  // about 80 blocks of 24 KiB
  StartStores(2, small);
  auto worker = StartConnected("prefill-0", FastOptions());
  const ClusterView view = View();
  const HeldTicket first = NewTicket(view);
  const SequenceBlocks pinned = Sequence(20);
  TestSlots slots(TestGeometry(), 20);
  Write(*worker, first, pinned, slots);
  const SequenceBlocks huge = Sequence(400, 100'000);
  const HeldTicket second = NewTicket(view);
  ASSERT_EQ(worker->tier().Lookup(second, pinned.blocks()).exact_blocks, 20);
  const auto refused = worker->tier().Reserve(second, huge.blocks(), 0, ReserveMode::kAllOrNothing);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_TRUE(absl::StrContains(refused.status().message(), "store-")) << refused.status();
  uint64_t reserved = 0;
  for (auto& store : stores_) reserved += store->Stats().reserved_bytes;
  EXPECT_EQ(reserved, 0u);
  EXPECT_EQ(Pins(), 20u);  // the first ticket's; the second one's lookup was let go, too
  // The first ticket is untouched, and smaller requests still fit.
  TestSlots few(TestGeometry(), 4);
  Write(*worker, NewTicket(view), Sequence(4, 900'000), few);
  EXPECT_EQ(worker->tier().Lookup(first, pinned.blocks()).exact_blocks, 20);
}

TEST_P(TierClientTest, Reserve_KeepGranted_ReturnsRefusedBlocksAsAbsent) {
  TestStoreOptions small;
  small.arena_bytes = 1 * kMiB;
  StartStores(1, small);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks kept = Sequence(8);
  TestSlots slots(TestGeometry(), 8);
  Write(*worker, ticket, kept, slots);
  const SequenceBlocks huge = Sequence(100, 100'000);
  const auto result = worker->tier().Reserve(ticket, huge.blocks(), 0, ReserveMode::kKeepGranted);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->refused, 100);
  EXPECT_FALSE(result->blocks[0].has_base());
  EXPECT_EQ(Pins(), 8u);  // what the ticket has stays
}

TEST_P(TierClientTest, Reserve_ForOutput_HoldsRoomUntilRelease) {
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  auto reserved = worker->tier().Reserve(ticket, sequence.blocks(), 60, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  const auto room = [&] {
    uint64_t sum = 0;
    for (auto& store : stores_) sum += store->Stats().output_reserved_blocks;
    return sum;
  };
  EXPECT_GE(room(), 60u);
  worker->tier().Release(ticket.ref());
  EXPECT_TRUE(Eventually([&] { return room() == 0; }));
}

TEST_P(TierClientTest, SecondWriterOfAPrefix_GetsTheWinnersBlocks) {
  StartStores(1);
  auto a = StartConnected("prefill-0", FastOptions());
  auto b = StartConnected("prefill-1", FastOptions());
  const HeldTicket first = NewTicket(View());
  const HeldTicket second = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots slots(TestGeometry(), 4);
  slots.Fill(17);
  auto mine = b->tier().Reserve(second, sequence.blocks(), 0, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(mine.ok());
  Write(*a, first, sequence, slots);
  // Sealed meanwhile: the loser's pushes end well or are void, and its seal points to the winner.
  b->PushLayers(second.ref(), mine->blocks, slots);
  for (const SealOutcome outcome : b->SealAll(second.ref(), mine->blocks)) {
    EXPECT_EQ(outcome, SealOutcome::kSealed);
  }
  TestSlots read(TestGeometry(), 4);
  EXPECT_EQ(b->PullAll(second.ref(), mine->blocks, read).blocks_ok, 4);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(read.SameBlock(slots, i, i));
  EXPECT_EQ(stores_[0]->Stats().blocks, 4u);
  // A third finds them sealed at once.
  const HeldTicket third = NewTicket(View());
  auto sealed = b->tier().Reserve(third, sequence.blocks(), 0, ReserveMode::kAllOrNothing);
  ASSERT_TRUE(sealed.ok());
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(sealed->already_sealed[i]);
}

TEST_P(TierClientTest, Sessions_OutliveTheirLeaseByRenewalAndPinsOfLiveTicketsStay) {
  TestStoreOptions short_lease;
  short_lease.lease = absl::Milliseconds(400);
  StartStores(1, short_lease);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots slots(TestGeometry(), 4);
  Write(*worker, ticket, sequence, slots);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  const absl::Time start = RealClock::Get().Now();
  EXPECT_TRUE(Eventually([&] { return RealClock::Get().Now() - start > absl::Seconds(2); }));
  EXPECT_EQ(FiguresOf(*worker, "store-0").sessions_opened, 1u);
  TestSlots read(TestGeometry(), 4);
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, read).blocks_ok, 4);
  // A worker that goes away without a word: the store lets go within a lease.
  stores_[0]->gate().SetFailure(absl::UnavailableError("cut off"));
  EXPECT_TRUE(Eventually([&] { return Pins() == 0; }));
  EXPECT_TRUE(Eventually([&] { return FiguresOf(*worker, "store-0").state != "up"; }));
  EXPECT_EQ(worker->PullAll(ticket.ref(), found.blocks, read).blocks_lost, 4);
}

TEST_P(TierClientTest, ManyTransfersAtOnce_AllEnd) {
  StartStores(2);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(kLongBlocks);
  TestSlots written(TestGeometry(), kLongBlocks);
  written.Fill(19);
  Write(*worker, ticket, sequence, written);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  constexpr int kTransfers = 1000;  // more than a channel takes at once
  TestSlots read(TestGeometry(), kTransfers);
  std::vector<PullBlock> list(kTransfers);
  std::vector<TransferOutcome> outcomes(kTransfers, TransferOutcome::kLost);
  std::vector<TransferWaiter> waiters(kTransfers);
  for (int i = 0; i < kTransfers; ++i) {
    list[i] = {ticket.ref(), &found.blocks[i % kLongBlocks], read.Addresses(i, Plane::kBase),
               read.Addresses(i, Plane::kResidual)};
    TierPull pull;
    pull.blocks = absl::MakeSpan(list).subspan(i, 1);
    pull.layer_end = TestGeometry().layers;
    pull.outcomes = absl::MakeSpan(outcomes).subspan(i, 1);
    pull.done = waiters[i].Done();
    worker->tier().Pull(std::move(pull));
  }
  for (int i = 0; i < kTransfers; ++i) {
    EXPECT_EQ(waiters[i].Wait().blocks_ok, 1) << i;
    EXPECT_EQ(outcomes[i], TransferOutcome::kOk) << i;
    EXPECT_TRUE(read.SameBlock(written, i, i % kLongBlocks)) << i;
  }
}

TEST_P(TierClientTest, Cancel_EndsATransferEarly) {
  if (GetParam() != TestPlane::kLoopback) GTEST_SKIP() << "faults are injected in loopback";
  StartStores(1);
  auto worker = StartConnected("decode-0", FastOptions());
  const HeldTicket ticket = NewTicket(View());
  const SequenceBlocks sequence = Sequence(4);
  TestSlots slots(TestGeometry(), 4);
  Write(*worker, ticket, sequence, slots);
  const LookupResult found = worker->tier().Lookup(ticket, sequence.blocks());
  stores_[0]->faults()->SetStalled(true);
  const PullBlock block = {ticket.ref(), &found.blocks[0], slots.Addresses(0, Plane::kBase),
                           nullptr};
  TransferOutcome outcome = TransferOutcome::kOk;
  TransferWaiter waiter;
  TierPull pull;
  pull.blocks = absl::MakeConstSpan(&block, 1);
  pull.layer_end = 1;
  pull.outcomes = absl::MakeSpan(&outcome, 1);
  pull.done = waiter.Done();
  const TransferId id = worker->tier().Pull(std::move(pull));
  worker->tier().Cancel(id);
  EXPECT_EQ(waiter.Wait().blocks_lost, 1);
  EXPECT_EQ(outcome, TransferOutcome::kLost);
  worker->tier().Cancel(id);  // ended: nothing
  stores_[0]->faults()->SetStalled(false);
}

TEST_P(TierClientTest, AnotherGeometry_IsRefusedWithBothNamed) {
  StartStores(1);
  auto first = StartConnected("prefill-0", FastOptions());
  model_.geometry.kv_heads = 4;  // the same model by name
  auto second = StartWorker("decode-0", FastOptions());
  second->tier().SetView(View());
  const HeldTicket ticket = NewTicket(View());
  (void)second->tier().WaitConnected(absl::Seconds(2));
  // A store may keep several geometries apart; never may one read the other's blocks.
  const SequenceBlocks sequence = Sequence(4);
  TestSlots slots(TestGeometry(), 4);
  Write(*first, ticket, sequence, slots);
  EXPECT_EQ(second->tier().Lookup(ticket, sequence.blocks()).base_blocks, 0);
}

INSTANTIATE_TEST_SUITE_P(Planes, TierClientTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
