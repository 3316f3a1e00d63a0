// One TierPull with everything it borrows: blocks of any sequences, a range of layers, into slots.
// Built and ended on the engine thread, which keeps it through shared_ptr until its end.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kvstore/client/task_queue.h"
#include "kvstore/client/tier_client.h"
#include "kvstore/client/tier_types.h"

namespace kvt {

class BlockPull : public std::enable_shared_from_this<BlockPull> {
 public:
  BlockPull(int layer_begin, int layer_end) : layer_begin_(layer_begin), layer_end_(layer_end) {}

  // `place` stays until the end; base and residual have one address for each layer of the range.
  void Add(TicketRef ticket, const PlacedBlock* place, absl::Span<std::byte* const> base,
           absl::Span<std::byte* const> residual);
  [[nodiscard]] size_t size() const { return blocks_.size(); }
  // `done` runs once as a task of the queue. Requires size() > 0.
  void Start(TierClient& tier, TaskQueue& queue, std::function<void(const TransferResult&)> done);
  // `done` still runs.
  void Cancel();

  // After the end, in the order added.
  [[nodiscard]] bool ok(size_t i) const { return outcomes_[i] == TransferOutcome::kOk; }

 private:
  const int layer_begin_;
  const int layer_end_;
  TierClient* tier_ = nullptr;
  TransferId id_;
  std::vector<PullBlock> blocks_;
  std::vector<std::byte*> base_;  // [block][layer of the range]
  std::vector<std::byte*> residual_;
  std::vector<TransferOutcome> outcomes_;
};

}  // namespace kvt
