// The bursts of one channel: accepted, in progress, finished. Shared by every implementation.
//
// Threads: Submit, Cancel, Close and Stats by anyone; everything else by the one transport thread
// that owns the channel's progress. A Burst belongs to that thread from TakeSubmitted to Finish.
// All memory is allocated at construction.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/mutex.h"
#include "kvstore/transport/transport.h"

namespace kvt {

struct Burst {
  BurstId id;
  bool is_push = false;
  absl::Span<const PullItem> pulls;
  absl::Span<const PushItem> pushes;
  absl::Span<PieceStatus> statuses;
  PushChecksums checksums = PushChecksums::kNone;
  absl::Time deadline;
  BurstDone done;

  // Progress.
  uint32_t next_item = 0;   // first item not handed to the peer yet
  uint32_t next_byte = 0;   // of that item
  uint32_t in_flight = 0;   // messages that refer to this burst
  uint32_t items_left = 0;  // without a verdict
  absl::Status ending;      // not ok: it ends with this once in_flight is zero

  [[nodiscard]] uint32_t size() const {
    return static_cast<uint32_t>(is_push ? pushes.size() : pulls.size());
  }
  [[nodiscard]] bool all_sent() const { return next_item == size(); }

 private:
  friend class BurstPool;
  uint32_t slot_ = 0;
  bool active_ = false;
  uint32_t ok_ = 0;
  uint32_t missed_ = 0;
  uint64_t bytes_ = 0;
};

class BurstPool {
 public:
  explicit BurstPool(const Geometry& geometry);

  // Checks and queues: InvalidArgument, ResourceExhausted, Unavailable as Channel says. An empty
  // burst is queued too. The caller wakes the transport thread.
  absl::StatusOr<BurstId> Submit(PullRequest request);
  absl::StatusOr<BurstId> Submit(PushRequest request);
  // The transport thread learns it by TakeCancelled. A stale id is ignored.
  void Cancel(BurstId id);
  // From now on Submit refuses with `why`. Idempotent: the first reason stays.
  void Close(const absl::Status& why);
  [[nodiscard]] bool IsOpen() const { return open_.load(std::memory_order_acquire); }
  [[nodiscard]] ChannelStats Stats() const;
  [[nodiscard]] uint32_t slice_bytes() const { return slice_bytes_; }

  // Transport thread only from here.
  // The oldest burst that was not taken yet, or null. It is active from now on.
  Burst* TakeSubmitted();
  // The next active burst that somebody cancelled, or null; each is returned once.
  Burst* TakeCancelled();
  [[nodiscard]] bool HasSubmitted() const { return submitted_.load(std::memory_order_acquire) > 0; }
  [[nodiscard]] bool HasCancelled() const { return cancels_.load(std::memory_order_acquire) > 0; }
  // Active bursts in order of submission; valid until the next TakeSubmitted or Finish.
  [[nodiscard]] absl::Span<Burst* const> Active() const { return active_; }
  // The active burst of that id, or null.
  [[nodiscard]] Burst* Find(BurstId id);
  // Records an item's verdict, once per item.
  void SetVerdict(Burst& burst, uint32_t item, PieceStatus status);
  // Ends it: frees its place, then calls `done`. in_flight is zero.
  void Finish(Burst& burst, absl::Status status);
  // The earliest deadline of the active bursts, InfiniteFuture when there are none.
  [[nodiscard]] absl::Time NextDeadline() const;

 private:
  absl::StatusOr<BurstId> Enqueue(Burst burst);
  absl::Status CheckItem(const Piece& piece, uint32_t part_bytes, const void* parts,
                         bool checksums) const;

  const Geometry geometry_;
  const uint32_t slice_bytes_;
  std::atomic<bool> open_{true};
  std::atomic<uint32_t> submitted_{0};
  std::atomic<uint32_t> cancels_{0};
  std::atomic<uint32_t> in_flight_{0};
  std::atomic<uint64_t> finished_{0}, missed_{0}, bytes_pulled_{0}, bytes_pushed_{0};

  mutable Mutex mu_;
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> queue_ ABSL_GUARDED_BY(mu_);  // ring of kChannelBurstsMax
  uint32_t queue_head_ ABSL_GUARDED_BY(mu_) = 0;
  uint32_t queue_size_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<BurstId> cancelled_ ABSL_GUARDED_BY(mu_);

  // Slots are written by Submit while free, by the transport thread while active; the mutex orders
  // the two.
  std::unique_ptr<Burst[]> slots_;
  std::vector<uint32_t> generations_;  // guarded like the slots
  std::vector<Burst*> active_;
};

}  // namespace kvt
