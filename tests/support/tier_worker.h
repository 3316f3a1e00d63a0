// A worker's side of the tier in a test: a TierClient with what it needs, a sequence, slots filled
// with bytes that can be told apart, and transfers that are waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/mutex.h"
#include "kvstore/client/tier_client.h"

namespace kvt {

inline Geometry TestGeometry() {
  Geometry geometry;
  geometry.layers = 3;
  geometry.kv_heads = 2;
  geometry.head_dim = 64;
  return geometry;
}

// Slots of `blocks` blocks, both planes, all layers, 64-byte aligned.
class TestSlots {
 public:
  TestSlots(const Geometry& geometry, int blocks);
  // Bytes that depend on (seed, block, plane, layer, offset).
  void Fill(uint64_t seed);
  // One block's bytes, depending on (seed, plane, layer, offset).
  void FillBlock(int block, uint64_t seed);
  // Addresses of a block's plane, one per layer from `layer` on.
  [[nodiscard]] std::byte* const* Addresses(int block, Plane plane, int layer = 0) const {
    return addresses_.data() + (static_cast<size_t>(block) * kPlanes + static_cast<size_t>(plane)) *
                                   geometry_.layers + layer;
  }
  [[nodiscard]] bool SameBlock(const TestSlots& other, int block, int other_block) const;
  [[nodiscard]] uint64_t bytes() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  const Geometry geometry_;
  uint64_t size_ = 0;
  std::unique_ptr<std::byte[], Free> memory_;
  std::vector<std::byte*> addresses_;
};

// Owns the client and a thread that calls Tick, as a worker's main does.
class TierWorker {
 public:
  TierWorker(TierClientConfig config, const Clock& clock);
  ~TierWorker();
  TierClient& tier() { return *tier_; }

  // Pushes, one request per layer as prefill does, and waits; blocks[i] takes slot block first + i.
  TransferResult PushLayers(TicketRef ticket, const std::vector<PlacedBlock>& blocks,
                            const TestSlots& slots, std::vector<TransferOutcome>* outcomes = nullptr);
  // Pulls [layer_begin, layer_end) of every block in one request and waits.
  TransferResult PullAll(TicketRef ticket, const std::vector<PlacedBlock>& blocks, TestSlots& slots,
                         std::vector<TransferOutcome>* outcomes = nullptr, int layer_begin = 0,
                         int layer_end = -1);
  std::vector<SealOutcome> SealAll(TicketRef ticket, std::vector<PlacedBlock>& blocks);

 private:
  const Geometry geometry_;
  CallPool calls_;
  std::unique_ptr<TierClient> tier_;
  Mutex mu_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread ticker_;
};

// A transfer's end, to wait for.
class TransferWaiter {
 public:
  TransferDone Done();
  // Fails the test after 30 s.
  TransferResult Wait();
  [[nodiscard]] bool IsDone();

 private:
  Mutex mu_;
  CondVar changed_;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  TransferResult result_ ABSL_GUARDED_BY(mu_);
};

// True once `condition` holds; false after `timeout`. For what happens on other threads.
bool Eventually(const std::function<bool()>& condition, absl::Duration timeout = absl::Seconds(20));

}  // namespace kvt
