#include "tests/support/disk_front.h"

#include <algorithm>

#include "kernels/base/clock.h"
#include "kvstore/index/block_handle.h"

namespace kvt {

void DiskFront::Spill(const BlockPlace& place, bool base, bool residual) {
  MutexLock lock(mu_);
  const auto move = [&](Plane plane, uint64_t offset) {
    const uint64_t record = PlaneRecordHandle(place.handle, plane);
    on_disk_[record] = offset;
    table_.MoveToDisk(record);
  };
  if (base) move(Plane::kBase, place.base_offset);
  if (residual) move(Plane::kResidual, place.residual_offset);
}

void DiskFront::SetAnswer(Answer answer) {
  MutexLock lock(mu_);
  answer_ = answer;
  changed_.NotifyAll();
}

PromoteReply DiskFront::Promote(const PromoteRequest& request) {
  ++promotes_;
  const int at_once = ++at_once_;
  int seen = at_once_max_;
  while (seen < at_once && !at_once_max_.compare_exchange_weak(seen, at_once)) {
  }
  PromoteReply reply;
  {
    MutexLock lock(mu_);
    const absl::Time until = RealClock::Get().Now() + std::min(request.wait, kPromoteWaitMax);
    while (answer_ == Answer::kLate && RealClock::Get().Now() < until) {
      changed_.WaitFor(mu_, until - RealClock::Get().Now());
    }
    size_t budget = answer_ == Answer::kReadHalf ? std::max<size_t>(1, request.records.size() / 2)
                                                 : request.records.size();
    for (const uint64_t record : request.records) {
      PromoteReply::Outcome outcome = PromoteReply::Outcome::kResident;
      const auto found = on_disk_.find(record);
      if (answer_ == Answer::kLate || budget == 0) {
        outcome = PromoteReply::Outcome::kLate;
      } else if (answer_ == Answer::kNoRoom) {
        outcome = PromoteReply::Outcome::kNoRoom;
      } else if (answer_ == Answer::kLost) {
        outcome = PromoteReply::Outcome::kLost;
      } else if (found != on_disk_.end() && answer_ != Answer::kRespill) {
        table_.Publish(record, found->second);
        on_disk_.erase(found);
      }
      if (budget > 0) --budget;
      reply.outcomes.push_back(outcome);
    }
  }
  --at_once_;
  return reply;
}

void DiskFront::ResolvePull(SessionId session, absl::Span<const Piece> pieces,
                            absl::Span<ResolvedPull> out) {
  ForwardingResolver::ResolvePull(session, pieces, out);
  MutexLock lock(mu_);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (out[i].status != PieceStatus::kOk || !on_disk_.contains(pieces[i].handle)) continue;
    ForwardingResolver::ReleasePull(session, pieces.subspan(i, 1));
    out[i] = ResolvedPull{nullptr, PieceStatus::kOnDisk};
  }
}

}  // namespace kvt
