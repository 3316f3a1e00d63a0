// In which order records leave memory, and blocks the disk. Per record class and plane two lists of
// records of sealed blocks that nobody pins and no transfer touches, least recently used first:
// those of blocks used by one ticket only, then those of blocks that a second ticket hit; so one
// pass over many new blocks does not push out what is shared. The second list holds at most
// kProtectedPercent of both; beyond that its oldest move to the end of the first. (Source: Karedla,
// Love, Wherry, "Caching strategies to improve disk system performance", 1994.) A third list keeps
// the records of blocks that are held: pinned or under a transfer. Besides, one list over all
// classes of KV of the unheld blocks that have something on disk, and one over those of digests.
//
// 1. A record in memory of a sealed block is in exactly one list of its class and plane; a record
//    that is not in memory, or not sealed, in none.
// 2. A sealed block is in its disk list exactly while it is unheld and has a plane on disk.
//
// Pure; not thread-safe (owned by BlockIndex). Links live in the blocks: no allocation.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kvstore/index/block_table.h"

namespace kvt {

class EvictionOrder {
 public:
  explicit EvictionOrder(BlockTable& table) : table_(table) {}

  // Puts the block's records into the lists where its state says they belong, as the most recently
  // used of those they are new in. To be called after each change of that state.
  void Place(uint32_t number);
  // Takes it out of all lists: before the block is freed or loses kSealed.
  void Remove(uint32_t number);

  // Walks a list from the first to give up to the last. Nothing may change meanwhile.
  template <typename Visit>  // bool Visit(number): false stops
  void Walk(RecordAllocator::ClassId cls, Plane plane, ListKind kind, Visit visit) const {
    if (cls >= classes_.size()) return;
    WalkList(classes_[cls][static_cast<size_t>(plane)][static_cast<size_t>(kind) - 1],
             static_cast<size_t>(plane), visit);
  }
  template <typename Visit>
  void WalkDisk(bool digests, Visit visit) const {
    WalkList(disk_[digests ? 1 : 0], kDiskLinks, visit);
  }
  [[nodiscard]] uint32_t classes() const { return static_cast<uint32_t>(classes_.size()); }
  // Entries of all lists.
  [[nodiscard]] uint64_t size() const { return size_; }

 private:
  struct List {
    uint32_t oldest = kNoBlock;
    uint32_t newest = kNoBlock;
    uint64_t size = 0;
  };
  template <typename Visit>
  void WalkList(const List& list, size_t links, Visit visit) const {
    for (uint32_t number = list.oldest; number != kNoBlock;
         number = table_.At(number).links[links].newer) {
      if (!visit(number)) return;
    }
  }
  List& ListOf(const Block& block, size_t links, ListKind kind) {
    if (links == kDiskLinks) return disk_[table_.IsDigest(block) ? 1 : 0];
    return classes_[block.cls][links][static_cast<size_t>(kind) - 1];
  }
  void Move(uint32_t number, size_t links, ListKind to);
  void Append(List& list, uint32_t number, size_t links);
  void Unlink(List& list, uint32_t number, size_t links);

  BlockTable& table_;
  std::vector<std::array<std::array<List, kListKinds - 1>, kPlanes>> classes_;
  std::array<List, 2> disk_;  // KV, digests
  uint64_t size_ = 0;
};

}  // namespace kvt
