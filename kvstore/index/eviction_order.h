// In which order sealed blocks that nobody pins and no transfer touches are given up. Per record
// class two lists, least recently used first: blocks used by one ticket only, then blocks that a
// second ticket hit; so one pass over many new blocks does not push out what is shared. The second
// list holds at most kProtectedPercent of both; beyond that its oldest move to the end of the
// first. (Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance",
// 1994.) Pure; not thread-safe (owned by BlockIndex). Links live in the blocks: no allocation.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kvstore/index/block_table.h"

namespace kvt {

class EvictionOrder {
 public:
  explicit EvictionOrder(BlockTable& table) : table_(table) {}

  // As the most recently used of its list. Precondition: not in the order.
  void Add(uint32_t number);
  // Precondition: in the order.
  void Remove(uint32_t number);

  // Walks the class from the first to give up to the last. Nothing may change meanwhile.
  template <typename Visit>  // bool Visit(number): false stops
  void Walk(RecordAllocator::ClassId cls, Visit visit) const {
    if (cls >= classes_.size()) return;
    for (const List& list : classes_[cls]) {
      for (uint32_t number = list.oldest; number != kNoBlock; number = table_.At(number).newer) {
        if (!visit(number)) return;
      }
    }
  }
  [[nodiscard]] uint32_t classes() const { return static_cast<uint32_t>(classes_.size()); }
  // Blocks in the order, of all classes.
  [[nodiscard]] uint64_t size() const { return size_; }

 private:
  struct List {
    uint32_t oldest = kNoBlock;
    uint32_t newest = kNoBlock;
    uint64_t size = 0;
  };
  void Append(List& list, uint32_t number);
  void Unlink(List& list, uint32_t number);

  BlockTable& table_;
  std::vector<std::array<List, 2>> classes_;  // [class][hit_again]
  uint64_t size_ = 0;
};

}  // namespace kvt
