#include "decode_worker/engine/step_fetch.h"

#include <algorithm>
#include <utility>

#include "kernels/base/check.h"

namespace kvt {

StepFetch::StepFetch(Deps deps, int layer, Rows rows, absl::Span<const OffloadedFetch> fetches,
                     std::function<void(const std::vector<bool>&)> done)
    : deps_(std::move(deps)),
      layer_(layer),
      rows_(std::move(rows)),
      fetches_(fetches.begin(), fetches.end()),
      done_(std::move(done)),
      ok_(fetches.size(), false) {}

bool StepFetch::Wanted(size_t fetch) const {
  const Sequence& seq = Row(fetch);
  return seq.phase == SequencePhase::kRunning && !seq.offload->step_lost;
}

void StepFetch::Start() {
  std::vector<size_t> wanted;
  for (size_t f = 0; f < fetches_.size(); ++f) {
    if (Wanted(f)) wanted.push_back(f);
  }
  Pull(std::move(wanted));
}

void StepFetch::Pull(std::vector<size_t> wanted) {
  if (wanted.empty()) {
    deps_.queue.Post([self = shared_from_this()] { self->Finish(); });
    return;
  }
  auto pull = std::make_shared<BlockPull>(layer_, layer_ + 1);
  const auto address = [this](uint32_t slot) {
    return reinterpret_cast<std::byte*>(deps_.cache.SlotAddress(slot));
  };
  for (const size_t f : wanted) {
    const BlockFetch& fetch = fetches_[f].fetch;
    std::byte* const base = address(fetch.pair.base);
    std::byte* const residual = address(fetch.pair.residual);
    const Sequence& seq = Row(f);
    pull->Add(seq.ticket.ref(), &seq.places[static_cast<size_t>(fetch.block)], {&base, 1},
              {&residual, 1});
  }
  pull->Start(deps_.tier, deps_.queue,
              [self = shared_from_this(), pull, wanted](const TransferResult& result) {
                self->OnPulled(*pull, wanted, result);
              });
}

void StepFetch::OnPulled(const BlockPull& pull, const std::vector<size_t>& wanted,
                         const TransferResult& result) {
  deps_.metrics.Pulled(result.bytes, 0, 0);
  deps_.metrics.StepPulled(result.bytes, result.bursts);
  const Sequence* counted = nullptr;  // a burst counts for all who take part
  for (size_t i = 0; i < wanted.size(); ++i) {
    const size_t f = wanted[i];
    Sequence& seq = Row(f);
    if (&seq != counted) seq.figures.pull_bursts += result.bursts;
    counted = &seq;
    ok_[f] = pull.ok(i);
    if (ok_[f]) {
      seq.figures.pulled_bytes += 2 * deps_.cache.slot_bytes();
    } else if (!retried_) {
      lost_.push_back(f);
    }
  }
  if (retried_ || lost_.empty()) return Finish();
  retried_ = true;
  retry_until_ = deps_.clock.Now() + kMissRetryFor;
  deps_.metrics.MissesRetried(lost_.size());
  LookAgain();
}

void StepFetch::LookAgain() {
  struct Asked {
    HeldTicket ticket;
    std::vector<TierBlock> names;
  };
  std::vector<Asked> asked;  // by row that lost something, in the order of lost_
  const Sequence* last = nullptr;
  lost_.erase(std::remove_if(lost_.begin(), lost_.end(), [this](size_t f) { return !Wanted(f); }),
              lost_.end());
  for (const size_t f : lost_) {
    const Sequence& seq = Row(f);
    if (&seq != last) asked.push_back({seq.ticket, {}});
    last = &seq;
    asked.back().names.push_back(seq.names.blocks()[static_cast<size_t>(fetches_[f].fetch.block)]);
  }
  const bool queued =
      !asked.empty() && deps_.control.TryRun([self = shared_from_this(), asked = std::move(asked)] {
        std::vector<LookupResult> found;
        for (const Asked& one : asked) {
          found.push_back(self->deps_.tier.Lookup(one.ticket, one.names, LookupReach::kEveryStore));
        }
        self->deps_.queue.Post([self, found = std::move(found)] { self->OnFound(found); });
      });
  if (!queued) Finish();
}

void StepFetch::OnFound(const std::vector<LookupResult>& found) {
  std::vector<PlacedBlock> places;  // as lost_
  bool unreachable = false;
  bool all = true;
  for (const LookupResult& result : found) {
    places.insert(places.end(), result.blocks.begin(), result.blocks.end());
    unreachable = unreachable || !result.unreachable.empty();
  }
  KVT_CHECK(places.size() == lost_.size(), "lost=", lost_.size());
  std::vector<size_t> there;
  for (size_t i = 0; i < lost_.size(); ++i) {
    const bool exact = places[i].presence == BlockPresence::kExact;
    all = all && exact;
    if (!exact || !Wanted(lost_[i])) continue;
    Row(lost_[i]).places[static_cast<size_t>(fetches_[lost_[i]].fetch.block)] = std::move(places[i]);
    there.push_back(lost_[i]);
  }
  const absl::Time again = deps_.clock.Now() + kMissRetryPause;
  if (!all && unreachable && again < retry_until_) {
    return deps_.at(again, [self = shared_from_this()] { self->LookAgain(); });
  }
  Pull(std::move(there));
}

void StepFetch::Finish() {
  int lost = 0;
  for (size_t f = 0; f < ok_.size(); ++f) {
    if (ok_[f]) continue;
    if (Wanted(f)) ++lost;
  }
  for (size_t f = 0; f < ok_.size(); ++f) {
    if (!ok_[f]) Row(f).offload->step_lost = true;
  }
  deps_.metrics.Pulled(0, 0, lost);
  done_(ok_);
}

}  // namespace kvt
