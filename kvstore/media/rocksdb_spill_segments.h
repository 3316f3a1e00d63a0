// What a spill folder's segments hold: live bytes and garbage, as figures. PURE: no file is touched
// here. Owned by the store, under its lock.
//
//   Add (being written) -> Commit -> AddLive/SubLive ... -> Remove
//
// 1. disk_bytes = the sum over segments, those being written included.
// 2. A segment has garbage when fewer records live than it was written with.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace kvt {

struct SpillSegment {
  uint64_t first = 0;  // sequences; `last` is the contents, not a record
  uint64_t last = 0;
  uint64_t disk_bytes = 0;
  uint64_t live_bytes = 0;
  uint64_t live_records = 0;
  bool committed = false;

  [[nodiscard]] uint64_t Records() const { return last - first; }
  [[nodiscard]] uint64_t GarbageBytes() const {
    return live_records >= Records() || disk_bytes <= live_bytes ? 0 : disk_bytes - live_bytes;
  }
};

class SpillSegments {
 public:
  // Its range overlaps no other's.
  void Add(uint64_t first, uint64_t last, uint64_t disk_bytes);
  void Commit(uint64_t first);
  void Remove(uint64_t first);
  [[nodiscard]] bool Contains(uint64_t sequence) const { return Find(sequence) != nullptr; }
  [[nodiscard]] bool IsThere(uint64_t first) const { return segments_.contains(first); }
  void AddLive(uint64_t sequence, uint64_t bytes);
  void SubLive(uint64_t sequence, uint64_t bytes);

  [[nodiscard]] uint64_t count() const { return segments_.size(); }
  [[nodiscard]] uint64_t disk_bytes() const { return disk_bytes_; }
  [[nodiscard]] uint64_t live_bytes() const { return live_bytes_; }
  [[nodiscard]] uint64_t garbage_bytes() const { return garbage_bytes_; }
  [[nodiscard]] std::vector<SpillSegment> BeingWritten() const;
  // Committed ones, by what they are good for.
  [[nodiscard]] std::vector<SpillSegment> Dead() const;
  [[nodiscard]] std::vector<SpillSegment> WithGarbage() const;
  // The one that gives most room for what it costs: greatest garbage per live byte, of those with
  // at most `live_bytes_max` live. Null: none has garbage.
  [[nodiscard]] const SpillSegment* Worst(uint64_t live_bytes_max) const;
  // At most `count` of the smallest, together at most `bytes`.
  [[nodiscard]] std::vector<SpillSegment> Smallest(uint64_t count, uint64_t bytes) const;

 private:
  [[nodiscard]] const SpillSegment* Find(uint64_t sequence) const;
  SpillSegment* Find(uint64_t sequence) {
    return const_cast<SpillSegment*>(static_cast<const SpillSegments*>(this)->Find(sequence));
  }

  std::map<uint64_t, SpillSegment> segments_;  // by first
  uint64_t disk_bytes_ = 0;
  uint64_t live_bytes_ = 0;
  uint64_t garbage_bytes_ = 0;  // of committed ones
};

}  // namespace kvt
