// Two models of different geometry in one arena that holds neither in full: slabs move between them
// when they are empty, in both directions, and each reads its own bytes only. Digests of one of them
// stay (kvstore/index/digest_geometry.h).
#include <array>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/random.h"
#include "kvstore/index/digest_geometry.h"
#include "tests/contract/tier_fixture.h"

namespace kvt {
namespace {

constexpr uint64_t kArenaBytes = 16 * kMiB;

// One of the two models: its worker, its keys, and blocks whose bytes follow from their number.
class Side {
 public:
  Side(ModelInfo model, std::unique_ptr<TierWorker> worker)
      : model_(std::move(model)), worker_(std::move(worker)), chain_(Domain(model_)) {}

  [[nodiscard]] const Geometry& geometry() const { return model_.geometry; }
  [[nodiscard]] int BlocksPerArena() const {
    return static_cast<int>(kArenaBytes / (uint64_t{geometry().RecordBytes()} * kPlanes));
  }
  TierWorker& worker() { return *worker_; }

  SequenceBlocks Sequence(int blocks, int32_t first, TicketId ticket) const {
    std::vector<int32_t> tokens(static_cast<size_t>(blocks) * kBlockTokens);
    std::iota(tokens.begin(), tokens.end(), first);
    SequenceBlocks sequence(chain_, ticket);
    sequence.Append(tokens);
    return sequence;
  }
  TestSlots Expected(int blocks, int32_t first) const {
    TestSlots slots(geometry(), blocks);
    slots.Fill(static_cast<uint64_t>(first) * 1000 + geometry().RecordBytes());
    return slots;
  }

  // Writes the sequence. OK, or the refusal; anything else fails the test.
  absl::Status Write(const HeldTicket& ticket, int blocks, int32_t first) {
    const SequenceBlocks sequence = Sequence(blocks, first, ticket.ticket.id);
    const LookupResult found = worker_->tier().Lookup(ticket, sequence.blocks());
    std::vector<TierBlock> missing;
    std::vector<int> numbers;
    for (int i = 0; i < blocks; ++i) {
      if (found.blocks[i].presence == BlockPresence::kExact) continue;
      missing.push_back(sequence.blocks()[i]);
      numbers.push_back(i);
    }
    auto reserved = worker_->tier().Reserve(ticket, missing, 0, ReserveMode::kAllOrNothing);
    if (!reserved.ok()) return reserved.status();
    // The slots of the missing ones, in their order.
    const TestSlots all = Expected(blocks, first);
    std::vector<PushBlock> list;
    std::vector<PlacedBlock*> placed;
    for (size_t i = 0; i < missing.size(); ++i) {
      if (reserved->already_sealed[i]) continue;
      list.push_back(PushBlock{ticket.ref(), &reserved->blocks[i],
                               all.Addresses(numbers[i], Plane::kBase),
                               all.Addresses(numbers[i], Plane::kResidual)});
      placed.push_back(&reserved->blocks[i]);
    }
    std::vector<TransferOutcome> outcomes(list.size());
    TransferWaiter waiter;
    TierPush push;
    push.blocks = list;
    push.layer_end = geometry().layers;
    push.outcomes = absl::MakeSpan(outcomes);
    push.done = waiter.Done();
    worker_->tier().Push(std::move(push));
    EXPECT_EQ(waiter.Wait().blocks_lost, 0);
    for (const SealOutcome outcome : worker_->tier().Seal(ticket.ref(), placed)) {
      EXPECT_EQ(outcome, SealOutcome::kSealed);
    }
    return absl::OkStatus();
  }

  // Pulls what is there of the sequence and compares every byte; how many blocks were there.
  int ReadAndCompare(const HeldTicket& ticket, int blocks, int32_t first) {
    const SequenceBlocks sequence = Sequence(blocks, first, ticket.ticket.id);
    const LookupResult found = worker_->tier().Lookup(ticket, sequence.blocks());
    std::vector<PlacedBlock> exact;
    std::vector<int> numbers;
    for (int i = 0; i < blocks; ++i) {
      if (found.blocks[i].presence != BlockPresence::kExact) continue;
      exact.push_back(found.blocks[i]);
      numbers.push_back(i);
    }
    if (exact.empty()) return 0;
    TestSlots read(geometry(), static_cast<int>(exact.size()));
    const TransferResult pulled = worker_->PullAll(ticket.ref(), exact, read);
    EXPECT_EQ(pulled.blocks_lost, 0);  // they are pinned
    const TestSlots all = Expected(blocks, first);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_TRUE(read.SameBlock(all, static_cast<int>(i), numbers[i]))
          << geometry().ToString() << ", sequence " << first << ", block " << numbers[i];
    }
    return static_cast<int>(exact.size());
  }

 private:
  static KeyDomain Domain(const ModelInfo& model) {
    KeyDomain domain;
    domain.cluster_secret = kTestSecret;
    domain.model_fingerprint = model.fingerprint;
    domain.numerics_id = model.numerics_id;
    domain.geometry = model.geometry;
    return domain;
  }

  const ModelInfo model_;
  const std::unique_ptr<TierWorker> worker_;
  const KeyChain chain_;
};

class TierGeometriesTest : public TierTest {
 protected:
  void SetUp() override {
    StartStores(1, {.arena_bytes = kArenaBytes});
    models_ = {TestModel(), TestModel()};
    models_[1].name = "large";
    models_[1].fingerprint = "beef";
    models_[1].geometry = Geometry{.layers = 5, .kv_heads = 3, .head_dim = 96};
    Connect();
  }
  void Connect() {
    for (const ModelInfo& model : models_) {
      model_ = model;
      sides_.push_back(
          std::make_unique<Side>(model, StartConnected(model.name, FastOptions())));
    }
  }
  // A ticket of that side's model.
  HeldTicket Ticket(int side) {
    MutexLock lock(mu_);
    model_ = models_[side];
    return NewTicket(View());
  }
  void Release(int side, const HeldTicket& ticket) {
    sides_[side]->worker().tier().Release(ticket.ref());
  }
  // Fills most of the arena with sequences of 16 blocks numbered from `first`, all held until the last
  // is there: a model's newcomers replace its own cold blocks before they take slabs of others
  // (kvstore/index/eviction_plan.h). How many sequences.
  int Fill(int side, int32_t first) {
    const int sequences = sides_[side]->BlocksPerArena() * 8 / 10 / 16;
    std::vector<HeldTicket> held;
    for (int i = 0; i < sequences; ++i) {
      held.push_back(Ticket(side));
      // What others had pinned is let go in the background.
      EXPECT_TRUE(Eventually([&] {
        return sides_[side]->Write(held.back(), 16, first + i * 1000).ok();
      })) << "side " << side << ", sequence " << i;
    }
    for (const HeldTicket& ticket : held) Release(side, ticket);
    return sequences;
  }
  // Blocks of those sequences that are there; all that are have their own bytes.
  int CountThere(int side, int32_t first, int sequences) {
    int there = 0;
    for (int i = 0; i < sequences; ++i) {
      const HeldTicket ticket = Ticket(side);
      there += sides_[side]->ReadAndCompare(ticket, 16, first + i * 1000);
      Release(side, ticket);
    }
    return there;
  }

  Mutex mu_;
  std::vector<ModelInfo> models_;
  std::vector<std::unique_ptr<Side>> sides_;
};

TEST_P(TierGeometriesTest, ArenaOfOneModel_GoesToTheOtherAndBack) {
  const int first = Fill(0, 1);
  EXPECT_EQ(CountThere(0, 1, first), first * 16);
  // The other model takes the arena: whole slabs of the first were emptied for it.
  const int second = Fill(1, 1);
  const int first_left = CountThere(0, 1, first);
  EXPECT_EQ(CountThere(1, 1, second), second * 16);
  EXPECT_LT(first_left, first * 16 / 2);
  // And back, with other sequences.
  const int third = Fill(0, 5'000'000);
  EXPECT_EQ(CountThere(0, 5'000'000, third), third * 16);
  EXPECT_LT(CountThere(1, 1, second), second * 16 / 2);

  const StoreStats stats = stores_[0]->Stats();
  EXPECT_LE(stats.used_bytes, stats.capacity_bytes);
  EXPECT_EQ(stats.used_bytes, stats.resident_bytes[0] + stats.resident_bytes[1] +
                                  stats.reserved_bytes + stats.writing_bytes +
                                  stats.evicting_bytes);
  EXPECT_TRUE(Eventually([&] { return Pins() == 0; }));
}

TEST_P(TierGeometriesTest, PinnedBlocks_StayThroughTheOthersPressure) {
  const HeldTicket pinned = Ticket(0);
  ASSERT_TRUE(sides_[0]->Write(pinned, 64, 7).ok());  // and held
  const int sequences = sides_[1]->BlocksPerArena() / 16 * 3;
  int written = 0;
  for (int i = 0; i < sequences; ++i) {
    const HeldTicket ticket = Ticket(1);
    const absl::Status status = sides_[1]->Write(ticket, 16, 1 + i * 1000);
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
    written += status.ok() ? 1 : 0;
    Release(1, ticket);
  }
  EXPECT_GT(written, sequences / 3);
  EXPECT_EQ(sides_[0]->ReadAndCompare(pinned, 64, 7), 64);
}

TEST_P(TierGeometriesTest, BothAtOnce_EachReadsItsOwnBytesOnly) {
  constexpr uint64_t kSeed = 20261129;
  SCOPED_TRACE(kSeed);
  constexpr int kSequences = 60;
  std::vector<std::thread> threads;
  std::array<int, 2> there{};
  for (int side = 0; side < 2; ++side) {
    threads.emplace_back([&, side] {
      Random random(kSeed + static_cast<uint64_t>(side));
      const absl::Time until = RealClock::Get().Now() + absl::Seconds(1);
      while (RealClock::Get().Now() < until) {
        const auto first = static_cast<int32_t>(1 + 1000 * random.Below(kSequences));
        const HeldTicket ticket = Ticket(side);
        there[side] += sides_[side]->ReadAndCompare(ticket, 16, first);
        const absl::Status status = sides_[side]->Write(ticket, 16, first);
        EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
        Release(side, ticket);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(there[0], 0);
  EXPECT_GT(there[1], 0);
  EXPECT_GT(stores_[0]->Stats().evicted_blocks, 0u);
}

// The digests are the oldest that there is and their session is the first.
class TierDigestsTest : public TierGeometriesTest {
 protected:
  void SetUp() override {
    StartStores(1, {.arena_bytes = kArenaBytes});
    models_ = {TestModel(), TestModel(), TestModel()};
    models_[0].name = "digests";
    models_[0].geometry = DigestGeometry(8);
    models_[2].name = "large";
    models_[2].fingerprint = "beef";
    models_[2].geometry = Geometry{.layers = 5, .kv_heads = 3, .head_dim = 96};
    Connect();
  }
};

TEST_P(TierDigestsTest, FullArenaGoesToAnotherModel_DigestsStayAndAllTheirKvGoes) {
  constexpr int kSequences = 5;  // each fills a slab; their share is eight
  for (int i = 0; i < kSequences; ++i) {
    const HeldTicket ticket = Ticket(0);
    ASSERT_TRUE(sides_[0]->Write(ticket, 16, 1 + i * 1000).ok());
    Release(0, ticket);
  }
  const int kv = Fill(1, 1);
  EXPECT_GT(CountThere(1, 1, kv), kv * 16 / 2);
  // Pinned KV cannot go, and is let go in the background.
  ASSERT_TRUE(Eventually([&] { return Pins() == 0; }));
  const int large = Fill(2, 1);
  EXPECT_EQ(CountThere(2, 1, large), large * 16);
  EXPECT_LT(CountThere(1, 1, kv), kv * 16 / 4);
  EXPECT_EQ(CountThere(0, 1, kSequences), kSequences * 16);
  EXPECT_TRUE(Eventually([&] { return Pins() == 0; }));
}

INSTANTIATE_TEST_SUITE_P(Planes, TierDigestsTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });
INSTANTIATE_TEST_SUITE_P(Planes, TierGeometriesTest, ::testing::ValuesIn(TestPlanes()),
                         [](const auto& info) { return TestPlaneName(info.param); });

}  // namespace
}  // namespace kvt
