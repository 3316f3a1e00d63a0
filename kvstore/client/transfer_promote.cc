// Of TransferTable: pieces that a store has on disk alone. Planning and bursts: transfer_table.cc.
#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kvstore/client/transfer_table.h"

namespace kvt {
namespace {

// One Promote call waits so long for the disk: then what has been read is pulled, and a transfer that
// was cancelled ends. Others of the call pool get their turn.
constexpr absl::Duration kPromoteSlice = absl::Milliseconds(200);
static_assert(kPromoteSlice <= kPromoteWaitMax);

bool HasOnDisk(absl::Span<const PieceStatus> statuses) {
  return std::find(statuses.begin(), statuses.end(), PieceStatus::kOnDisk) != statuses.end();
}

}  // namespace

bool TransferTable::WantsPromotion(const Part& part) const {
  const Transfer& transfer = *part.transfer;
  return transfer.is_pull && !transfer.cancelled.load() && part.promotions < kPromotionsMax &&
         HasOnDisk(part.statuses);
}

void TransferTable::StartPromotion(Part& part) {
  part.transfer->open_ends.fetch_add(1);
  links_.CallStarted();
  {
    MutexLock lock(mu_);
    part.promote_began = RealClock::Get().Now();
    promote_queue_.push_back(&part);
  }
  RunPromotions();
}

void TransferTable::RunPromotions() {
  while (true) {
    Part* part = nullptr;
    {
      MutexLock lock(mu_);
      if (promoting_ >= promoting_max_ || promote_queue_.empty()) return;
      part = promote_queue_.front();
      promote_queue_.pop_front();
      ++promoting_;
    }
    if (calls_.TryRun([this, part] { PromoteAndGoOn(*part); })) continue;
    {
      MutexLock lock(mu_);
      --promoting_;
    }
    EndPromotion(*part);  // what is still on disk counts as lost
  }
}

void TransferTable::PromoteAndGoOn(Part& part) {
  const bool again = PromoteSlice(part);
  {
    MutexLock lock(mu_);
    --promoting_;
    if (again) promote_queue_.push_back(&part);
  }
  RunPromotions();
  if (!again) EndPromotion(part);
}

void TransferTable::EndPromotion(Part& part) {
  CloseEnds(*part.transfer, 1);
  links_.CallEnded();
}

bool TransferTable::PromoteSlice(Part& part) {
  Transfer& transfer = *part.transfer;
  const absl::Duration left = transfer.deadline - RealClock::Get().Now();
  if (transfer.cancelled.load() || left <= absl::ZeroDuration()) return false;
  const absl::StatusOr<LinkSession> session = part.link->CurrentSession();
  if (!session.ok() || session->incarnation != part.incarnation) return false;
  // The records of one ticket; those of others with the next call.
  PromoteRequest request;
  std::vector<size_t> asked;
  for (size_t i = 0; i < part.statuses.size(); ++i) {
    if (part.statuses[i] != PieceStatus::kOnDisk) continue;
    const Piece& piece = part.pulls[i].piece;
    const TicketRef ticket{TicketId(piece.ticket), TicketEpoch(piece.ticket_epoch)};
    if (asked.empty()) request.ticket = ticket;
    if (ticket.id != request.ticket.id || ticket.epoch != request.ticket.epoch) continue;
    request.records.push_back(piece.handle);
    asked.push_back(i);
  }
  if (asked.empty()) return false;
  request.session = session->session;
  request.wait = std::min(left, kPromoteSlice);
  const absl::StatusOr<PromoteReply> reply = session->api->Promote(request);
  part.link->EndCall(*session, reply.status());
  part.link->counters().promote_calls += 1;
  std::vector<size_t> resident;
  const bool answered = reply.ok() && reply->outcomes.size() == asked.size();
  for (size_t k = 0; k < asked.size(); ++k) {
    const PromoteReply::Outcome outcome =
        answered ? reply->outcomes[k] : PromoteReply::Outcome::kLost;
    if (outcome == PromoteReply::Outcome::kLate) continue;
    if (outcome == PromoteReply::Outcome::kResident) resident.push_back(asked[k]);
    // Of a piece that is in memory now the new part has the verdict.
    part.statuses[asked[k]] = outcome == PromoteReply::Outcome::kResident ? PieceStatus::kOk
                                                                          : PieceStatus::kLost;
  }
  if (!resident.empty()) PullPromoted(part, resident);
  return HasOnDisk(part.statuses);
}

void TransferTable::PullPromoted(const Part& from, absl::Span<const size_t> pieces) {
  Transfer& transfer = *from.transfer;
  Part& part = TakePart(transfer, transfer.disk_parts, transfer.disk_part_count);
  part.link = from.link;
  part.incarnation = from.incarnation;
  part.promotions = from.promotions + 1;
  part.promote_began = from.promote_began;
  for (const size_t i : pieces) {
    part.pulls.push_back(from.pulls[i]);
    part.block_of.push_back(from.block_of[i]);
  }
  transfer.open_ends.fetch_add(2);
  SendPart(part);
}

}  // namespace kvt
