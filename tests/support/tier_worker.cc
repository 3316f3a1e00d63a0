#include "tests/support/tier_worker.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/random.h"

namespace kvt {

void TestSlots::Free::operator()(std::byte* p) const { std::free(p); }

TestSlots::TestSlots(const Geometry& geometry, int blocks)
    : geometry_(geometry),
      size_(uint64_t{geometry.SlotBytes()} * geometry.layers * kPlanes * blocks),
      memory_(static_cast<std::byte*>(std::aligned_alloc(64, size_))) {
  std::memset(memory_.get(), 0, size_);
  for (uint64_t offset = 0; offset < size_; offset += geometry.SlotBytes()) {
    addresses_.push_back(memory_.get() + offset);
  }
}

void TestSlots::Fill(uint64_t seed) {
  for (uint64_t i = 0; i < size_; i += sizeof(uint64_t)) {
    const uint64_t word = CounterRandom(seed, i);
    std::memcpy(memory_.get() + i, &word, sizeof(word));
  }
}

void TestSlots::FillBlock(int block, uint64_t seed) {
  const uint64_t bytes = uint64_t{geometry_.SlotBytes()} * geometry_.layers * kPlanes;
  for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    const uint64_t word = CounterRandom(seed, i);
    std::memcpy(memory_.get() + block * bytes + i, &word, sizeof(word));
  }
}

bool TestSlots::SameBlock(const TestSlots& other, int block, int other_block) const {
  const uint64_t bytes = uint64_t{geometry_.SlotBytes()} * geometry_.layers * kPlanes;
  return std::memcmp(memory_.get() + block * bytes, other.memory_.get() + other_block * bytes,
                     bytes) == 0;
}

TierWorker::TierWorker(TierClientConfig config, const Clock& clock)
    : geometry_(config.model.geometry), calls_(config.options.control_threads) {
  tier_ = std::make_unique<TierClient>(std::move(config), calls_, clock);
  ticker_ = std::thread([this, &clock] {
    MutexLock lock(mu_);
    while (!stopping_) {
      tier_->Tick(clock.Now());
      wake_.WaitFor(mu_, absl::Milliseconds(5));
    }
  });
}

TierWorker::~TierWorker() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  ticker_.join();
  tier_->Close();
  calls_.Stop();
}

TransferResult TierWorker::PushLayers(TicketRef ticket, const std::vector<PlacedBlock>& blocks,
                                      const TestSlots& slots,
                                      std::vector<TransferOutcome>* outcomes) {
  TransferResult sum;
  std::vector<TransferOutcome> worst(blocks.size(), TransferOutcome::kOk);
  for (int layer = 0; layer < geometry_.layers; ++layer) {
    std::vector<PushBlock> list;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const int block = static_cast<int>(i);
      list.push_back(PushBlock{ticket, &blocks[i], slots.Addresses(block, Plane::kBase, layer),
                               slots.Addresses(block, Plane::kResidual, layer)});
    }
    std::vector<TransferOutcome> of_layer(blocks.size());
    TransferWaiter waiter;
    TierPush push;
    push.blocks = list;
    push.layer_begin = layer;
    push.layer_end = layer + 1;
    push.outcomes = absl::MakeSpan(of_layer);
    push.done = waiter.Done();
    tier_->Push(std::move(push));
    const TransferResult result = waiter.Wait();
    sum.bytes += result.bytes;
    sum.bursts += result.bursts;
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (of_layer[i] != TransferOutcome::kOk) worst[i] = of_layer[i];
    }
  }
  for (const TransferOutcome outcome : worst) {
    ++(outcome == TransferOutcome::kOk ? sum.blocks_ok : sum.blocks_lost);
  }
  if (outcomes != nullptr) *outcomes = worst;
  return sum;
}

TransferResult TierWorker::PullAll(TicketRef ticket, const std::vector<PlacedBlock>& blocks,
                                   TestSlots& slots, std::vector<TransferOutcome>* outcomes,
                                   int layer_begin, int layer_end) {
  if (layer_end < 0) layer_end = geometry_.layers;
  std::vector<PullBlock> list;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int block = static_cast<int>(i);
    list.push_back(PullBlock{ticket, &blocks[i],
                             slots.Addresses(block, Plane::kBase, layer_begin),
                             slots.Addresses(block, Plane::kResidual, layer_begin)});
  }
  std::vector<TransferOutcome> out(blocks.size());
  TransferWaiter waiter;
  TierPull pull;
  pull.blocks = list;
  pull.layer_begin = layer_begin;
  pull.layer_end = layer_end;
  pull.outcomes = absl::MakeSpan(out);
  pull.done = waiter.Done();
  tier_->Pull(std::move(pull));
  const TransferResult result = waiter.Wait();
  if (outcomes != nullptr) *outcomes = out;
  return result;
}

std::vector<SealOutcome> TierWorker::SealAll(TicketRef ticket, std::vector<PlacedBlock>& blocks) {
  std::vector<PlacedBlock*> pointers;
  for (PlacedBlock& block : blocks) pointers.push_back(&block);
  return tier_->Seal(ticket, pointers);
}

TransferDone TransferWaiter::Done() {
  return [this](const TransferResult& result) {
    MutexLock lock(mu_);
    KVT_CHECK(!done_, "a completion came twice");
    done_ = true;
    result_ = result;
    changed_.NotifyAll();
  };
}

TransferResult TransferWaiter::Wait() {
  const absl::Time deadline = RealClock::Get().Now() + absl::Seconds(30);
  MutexLock lock(mu_);
  while (!done_) {
    KVT_CHECK(RealClock::Get().Now() < deadline, "a transfer has not ended within 30 s");
    changed_.WaitFor(mu_, absl::Seconds(1));
  }
  return result_;
}

bool TransferWaiter::IsDone() {
  MutexLock lock(mu_);
  return done_;
}

bool Eventually(const std::function<bool()>& condition, absl::Duration timeout) {
  const absl::Time deadline = RealClock::Get().Now() + timeout;
  Mutex mu;
  CondVar never;
  while (!condition()) {
    if (RealClock::Get().Now() >= deadline) return false;
    MutexLock lock(mu);
    never.WaitFor(mu, absl::Milliseconds(2));
  }
  return true;
}

}  // namespace kvt
