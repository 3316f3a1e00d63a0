#include "decode_worker/offload/block_pull.h"

#include <utility>

#include "kernels/base/check.h"

namespace kvt {

void BlockPull::Add(TicketRef ticket, const PlacedBlock* place, absl::Span<std::byte* const> base,
                    absl::Span<std::byte* const> residual) {
  const auto layers = static_cast<size_t>(layer_end_ - layer_begin_);
  KVT_CHECK(base.size() == layers && residual.size() == layers, "base=", base.size());
  blocks_.push_back({.ticket = ticket, .block = place});
  base_.insert(base_.end(), base.begin(), base.end());
  residual_.insert(residual_.end(), residual.begin(), residual.end());
}

void BlockPull::Start(TierClient& tier, TaskQueue& queue,
                      std::function<void(const TransferResult&)> done) {
  KVT_CHECK(!blocks_.empty() && tier_ == nullptr);
  tier_ = &tier;
  const auto layers = static_cast<size_t>(layer_end_ - layer_begin_);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].base = &base_[i * layers];
    blocks_[i].residual = &residual_[i * layers];
  }
  outcomes_.assign(blocks_.size(), TransferOutcome::kSkipped);
  id_ = tier.Pull({.blocks = blocks_,
                   .layer_begin = layer_begin_,
                   .layer_end = layer_end_,
                   .outcomes = absl::MakeSpan(outcomes_),
                   .done = [self = shared_from_this(), &queue,
                            done = std::move(done)](const TransferResult& result) {
                     queue.Post([self, done, result] { done(result); });
                   }});
}

void BlockPull::Cancel() {
  if (tier_ != nullptr) tier_->Cancel(id_);
}

}  // namespace kvt
