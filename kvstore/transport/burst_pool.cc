#include "kvstore/transport/burst_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

constexpr uint32_t kSlots = kChannelBurstsMax;

bool Aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kPieceAlignment == 0;
}

}  // namespace

BurstPool::BurstPool(const Geometry& geometry)
    : geometry_(geometry),
      slice_bytes_(geometry.SliceBytes()),
      queue_(kSlots),
      slots_(std::make_unique<Burst[]>(kSlots)),
      generations_(kSlots, 0) {
  free_.reserve(kSlots);
  cancelled_.reserve(kSlots);
  active_.reserve(kSlots);
  for (uint32_t i = 0; i < kSlots; ++i) free_.push_back(kSlots - 1 - i);
}

absl::Status BurstPool::CheckItem(const Piece& piece, uint32_t part_bytes, const void* parts,
                                  bool checksums) const {
  const uint32_t unit = checksums ? slice_bytes_ : kPieceAlignment;
  const bool good = parts != nullptr && piece.length > 0 && part_bytes > 0 &&
                    piece.length % part_bytes == 0 && part_bytes % unit == 0 &&
                    piece.offset % unit == 0 && piece.reserved == 0 &&
                    uint64_t{piece.offset} + piece.length <= geometry_.RecordBytes();
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "burst: piece of ", piece.length, " bytes at ", piece.offset, " in parts of ", part_bytes,
      checksums ? " with checksums" : "", ", geometry ", geometry_.ToString()));
}

absl::StatusOr<BurstId> BurstPool::Submit(PullRequest request) {
  if (request.items.size() != request.statuses.size() ||
      request.items.size() > kBurstPiecesCeiling || request.done == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("pull: ", request.items.size(), " items, ",
                                                   request.statuses.size(), " statuses"));
  }
  for (const PullItem& item : request.items) {
    KVT_RETURN_IF_ERROR(
        CheckItem(item.piece, item.part_bytes, item.parts, item.checksums != nullptr));
    for (uint32_t i = 0; i < item.piece.length / item.part_bytes; ++i) {
      if (!Aligned(item.parts[i])) return absl::InvalidArgumentError("pull: unaligned destination");
    }
  }
  Burst burst;
  burst.pulls = request.items;
  burst.statuses = request.statuses;
  burst.deadline = request.deadline;
  burst.done = std::move(request.done);
  return Enqueue(std::move(burst));
}

absl::StatusOr<BurstId> BurstPool::Submit(PushRequest request) {
  if (request.items.size() != request.statuses.size() ||
      request.items.size() > kBurstPiecesCeiling || request.done == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("push: ", request.items.size(), " items, ",
                                                   request.statuses.size(), " statuses"));
  }
  const bool checksums = request.checksums != PushChecksums::kNone;
  for (const PushItem& item : request.items) {
    KVT_RETURN_IF_ERROR(CheckItem(item.piece, item.part_bytes, item.parts, checksums));
    if (checksums && item.checksums == nullptr) {
      return absl::InvalidArgumentError("push: no room for checksums");
    }
  }
  Burst burst;
  burst.is_push = true;
  burst.pushes = request.items;
  burst.statuses = request.statuses;
  burst.checksums = request.checksums;
  burst.deadline = request.deadline;
  burst.done = std::move(request.done);
  return Enqueue(std::move(burst));
}

absl::StatusOr<BurstId> BurstPool::Enqueue(Burst burst) {
  burst.items_left = burst.size();
  MutexLock lock(mu_);
  if (!closed_.ok()) return closed_;
  if (free_.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("channel: ", kChannelBurstsMax, " bursts are in flight"));
  }
  std::fill(burst.statuses.begin(), burst.statuses.end(), PieceStatus::kNotAttempted);
  const uint32_t slot = free_.back();
  free_.pop_back();
  burst.slot_ = slot;
  burst.id = BurstId((uint64_t{++generations_[slot]} << 32) | slot);
  slots_[slot] = std::move(burst);
  queue_[(queue_head_ + queue_size_) % kSlots] = slot;
  ++queue_size_;
  submitted_.fetch_add(1, std::memory_order_release);
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  return slots_[slot].id;
}

void BurstPool::Cancel(BurstId id) {
  const auto slot = static_cast<uint32_t>(id.value());
  MutexLock lock(mu_);
  if (slot >= kSlots || cancelled_.size() == kSlots) return;
  if (generations_[slot] != id.value() >> 32) return;
  if (std::find(cancelled_.begin(), cancelled_.end(), id) == cancelled_.end()) {
    cancelled_.push_back(id);
    cancels_.store(static_cast<uint32_t>(cancelled_.size()), std::memory_order_release);
  }
}

void BurstPool::Close(const absl::Status& why) {
  MutexLock lock(mu_);
  if (closed_.ok()) closed_ = why;
  open_.store(false, std::memory_order_release);
}

ChannelStats BurstPool::Stats() const {
  ChannelStats stats;
  stats.bytes_pulled = bytes_pulled_.load(std::memory_order_relaxed);
  stats.bytes_pushed = bytes_pushed_.load(std::memory_order_relaxed);
  stats.bursts = finished_.load(std::memory_order_relaxed);
  stats.pieces_missed = missed_.load(std::memory_order_relaxed);
  stats.bursts_in_flight = in_flight_.load(std::memory_order_relaxed);
  return stats;
}

Burst* BurstPool::TakeSubmitted() {
  if (!HasSubmitted()) return nullptr;
  MutexLock lock(mu_);
  if (queue_size_ == 0) return nullptr;
  Burst* burst = &slots_[queue_[queue_head_]];
  queue_head_ = (queue_head_ + 1) % kSlots;
  --queue_size_;
  submitted_.fetch_sub(1, std::memory_order_relaxed);
  burst->active_ = true;
  active_.push_back(burst);
  return burst;
}

Burst* BurstPool::TakeCancelled() {
  if (!HasCancelled()) return nullptr;
  MutexLock lock(mu_);
  for (size_t i = 0; i < cancelled_.size(); ++i) {
    Burst* burst = Find(cancelled_[i]);
    // One that is still queued becomes active later; one that is gone needs nothing.
    const auto slot = static_cast<uint32_t>(cancelled_[i].value());
    const bool queued = burst == nullptr && slots_[slot].id == cancelled_[i];
    if (queued) continue;
    cancelled_.erase(cancelled_.begin() + static_cast<ptrdiff_t>(i--));
    cancels_.store(static_cast<uint32_t>(cancelled_.size()), std::memory_order_release);
    if (burst != nullptr) return burst;
  }
  return nullptr;
}

Burst* BurstPool::Find(BurstId id) {
  const auto slot = static_cast<uint32_t>(id.value());
  if (slot >= kSlots || !slots_[slot].active_ || slots_[slot].id != id) return nullptr;
  return &slots_[slot];
}

void BurstPool::SetVerdict(Burst& burst, uint32_t item, PieceStatus status) {
  KVT_CHECK(item < burst.size() && burst.items_left > 0, "item ", item, " of ", burst.size());
  burst.statuses[item] = status;
  --burst.items_left;
  if (status == PieceStatus::kOk) {
    ++burst.ok_;
    burst.bytes_ +=
        burst.is_push ? burst.pushes[item].piece.length : burst.pulls[item].piece.length;
  } else {
    ++burst.missed_;
  }
}

void BurstPool::Finish(Burst& burst, absl::Status status) {
  KVT_CHECK(burst.active_ && burst.in_flight == 0, "in flight ", burst.in_flight);
  BurstResult result;
  result.status = std::move(status);
  result.pieces_ok = burst.ok_;
  result.pieces_missed = burst.missed_;
  result.bytes = burst.bytes_;
  finished_.fetch_add(1, std::memory_order_relaxed);
  missed_.fetch_add(burst.missed_, std::memory_order_relaxed);
  (burst.is_push ? bytes_pushed_ : bytes_pulled_)
      .fetch_add(burst.bytes_, std::memory_order_relaxed);
  BurstDone done = std::move(burst.done);
  active_.erase(std::find(active_.begin(), active_.end(), &burst));
  {
    MutexLock lock(mu_);
    burst.active_ = false;
    burst.id = BurstId();
    burst.done = nullptr;
    free_.push_back(burst.slot_);
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
  }
  done(result);
}

absl::Time BurstPool::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Burst* burst : active_) next = std::min(next, burst->deadline);
  return next;
}

}  // namespace kvt
