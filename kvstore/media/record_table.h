// Where each record lies in the arena, in shared memory, so that same-host readers need no message
// to find a record and to notice that it went.
//
// Memory: an array of entries, one per record index; entry = { handle, place }, place = turn << 44 |
// offset. The low half of a handle is its index (kvstore/transport/piece.h). The protocol is a
// seqlock whose sequence is the handle together with the turn:
//   writer (the store):  Publish(handle, offset)  when the record's bytes are final (sealed, or back
//                                                 from disk);
//                        MoveToDisk(handle)       before its memory is reused, the record stays;
//                        Withdraw(index)          before its bytes change or its memory is reused.
//   reader:              Look(handle) -> spot, read the bytes, IsCurrent(handle, spot) still?
// 1. An entry's handle is zero or the one whose bytes lie, complete, at its offset; offset kOnDisk:
//    nowhere in the arena.
// 2. A handle is never published again with other bytes; published again with the same ones, its
//    turn differs (by 2^20 turns), so a reader that slept over a trip to disk notices.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "kernels/base/check.h"
#include "kvstore/media/shared_mapping.h"

namespace kvt {

// Either the store's writable table or a client's read-only one. Publish and Withdraw of one index
// by one thread at a time; reads by anyone. Movable; owns its mapping.
class RecordTable {
 public:
  // A table of `records` entries, all withdrawn.
  static absl::StatusOr<RecordTable> Create(uint32_t records) {
    SharedMappingOptions options;
    options.populate = false;
    auto mapping =
        SharedMapping::Create("kvtide-records", sizeof(Entry) * uint64_t{records}, options);
    if (!mapping.ok()) return mapping.status();
    return RecordTable(std::move(*mapping), records);
  }
  // A client's view of a table received from the store.
  static absl::StatusOr<RecordTable> MapReadOnly(UniqueFd fd) {
    auto mapping = SharedMapping::MapReadOnly(std::move(fd), SharedMappingOptions{});
    if (!mapping.ok()) return mapping.status();
    const auto records = static_cast<uint32_t>(mapping->size() / sizeof(Entry));
    return RecordTable(std::move(*mapping), records);
  }

  // Where a record was when a reader looked.
  struct Spot {
    uint64_t offset = 0;
    uint64_t place = 0;  // the entry's word, for IsCurrent
    bool on_disk = false;
  };
  // Offsets are below it.
  static constexpr uint64_t kOffsetEnd = (uint64_t{1} << 44) - 1;

  void Publish(uint64_t handle, uint64_t offset) {
    KVT_CHECK(offset < kOffsetEnd, "offset ", offset);
    Set(handle, offset);
  }
  // The record's bytes are on disk alone. As Withdraw's, what this thread writes later is ordered
  // behind it.
  void MoveToDisk(uint64_t handle) {
    Withdraw(static_cast<uint32_t>(handle));
    Set(handle, kOnDisk);
  }
  // After it returns, bytes written by this thread are ordered behind the withdrawal.
  void Withdraw(uint32_t index) {
    At(index).handle.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

  // The record's offset in the arena, or nothing when it is not there (or the index is outside).
  [[nodiscard]] std::optional<uint64_t> Find(uint64_t handle) const {
    const std::optional<Spot> spot = Look(handle);
    if (!spot.has_value() || spot->on_disk) return std::nullopt;
    return spot->offset;
  }
  // Where the record is; nothing when there is no such record.
  [[nodiscard]] std::optional<Spot> Look(uint64_t handle) const {
    const auto index = static_cast<uint32_t>(handle);
    if (index >= records_ || handle == 0) return std::nullopt;
    const Entry& entry = entries_[index];
    if (entry.handle.load(std::memory_order_acquire) != handle) return std::nullopt;
    // A place of a later turn of the handle may be seen: its bytes are final as well.
    const uint64_t place = entry.place.load(std::memory_order_acquire);
    const uint64_t offset = place & kOnDisk;
    return Spot{offset, place, offset == kOnDisk};
  }
  // True when everything read since Look(handle) gave `spot` is that record's.
  [[nodiscard]] bool IsCurrent(uint64_t handle, const Spot& spot) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    const auto index = static_cast<uint32_t>(handle);
    if (index >= records_) return false;
    const Entry& entry = entries_[index];
    return entry.place.load(std::memory_order_relaxed) == spot.place &&
           entry.handle.load(std::memory_order_relaxed) == handle;
  }
  // Brings the entry into the cache.
  void Prefetch(uint64_t handle) const {
    const auto index = static_cast<uint32_t>(handle);
    if (index < records_) __builtin_prefetch(&entries_[index]);
  }

  [[nodiscard]] uint32_t records() const { return records_; }
  [[nodiscard]] const SharedMapping& mapping() const { return mapping_; }

 private:
  struct Entry {
    std::atomic<uint64_t> handle;
    std::atomic<uint64_t> place;
  };
  static constexpr uint64_t kOnDisk = kOffsetEnd;  // all bits of an offset
  static_assert(sizeof(Entry) == 16 && std::atomic<uint64_t>::is_always_lock_free);

  RecordTable(SharedMapping mapping, uint32_t records)
      : mapping_(std::move(mapping)),
        entries_(reinterpret_cast<Entry*>(const_cast<std::byte*>(mapping_.data()))),
        records_(records) {}
  // The writer's alone. Precondition: the entry's handle is zero or `handle`.
  void Set(uint64_t handle, uint64_t offset) {
    Entry& entry = At(static_cast<uint32_t>(handle));
    const uint64_t turn = (entry.place.load(std::memory_order_relaxed) >> 44) + 1;
    entry.place.store(turn << 44 | offset, std::memory_order_release);
    entry.handle.store(handle, std::memory_order_release);
  }
  Entry& At(uint32_t index) {
    KVT_CHECK(index < records_ && mapping_.writable(), "record index ", index, " of ", records_);
    return entries_[index];
  }

  SharedMapping mapping_;
  Entry* entries_;  // into mapping_; written only when it is writable
  uint32_t records_;
};

}  // namespace kvt
