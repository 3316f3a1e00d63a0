// Stores and workers in this process, for tests of TierClient (tier_client*_test.cc): their index and
// arena, control by their own interface through a gate that can fail, bytes over the plane that the
// test is instantiated with.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvstore/client/placement.h"
#include "kvstore/client/tier_client.h"
#include "tests/support/test_store.h"
#include "tests/support/tier_worker.h"

namespace kvt {

inline constexpr char kTestSecret[] = "0123456789abcdef0123456789abcdef";

inline ModelInfo TestModel() {
  ModelInfo model;
  model.name = "test";
  model.fingerprint = "f00d";
  model.numerics_id = "n1";
  model.geometry = TestGeometry();
  return model;
}

inline KeyChain TestChain() {
  KeyDomain domain;
  domain.cluster_secret = kTestSecret;
  domain.model_fingerprint = TestModel().fingerprint;
  domain.numerics_id = TestModel().numerics_id;
  domain.geometry = TestGeometry();
  return KeyChain(domain);
}

// Long enough for five groups: both of two stores own some (checked where it matters).
inline constexpr int kLongBlocks = kFirstGroupBlocks + 4 * kGroupBlocks;

class TierTest : public ::testing::TestWithParam<TestPlane> {
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

  std::unique_ptr<TierWorker> StartWorker(const std::string& name, ClientOptions options,
                                          WireVersionRange versions = {}) {
    TierClientConfig config;
    config.versions = versions;
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

}  // namespace kvt
