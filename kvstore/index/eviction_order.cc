#include "kvstore/index/eviction_order.h"

#include "kernels/base/check.h"
#include "kvstore/index/limits.h"

namespace kvt {

void EvictionOrder::Append(List& list, uint32_t number) {
  Block& block = table_.At(number);
  block.newer = kNoBlock;
  block.older = list.newest;
  (list.newest == kNoBlock ? list.oldest : table_.At(list.newest).newer) = number;
  list.newest = number;
  ++list.size;
}

void EvictionOrder::Unlink(List& list, uint32_t number) {
  Block& block = table_.At(number);
  (block.older == kNoBlock ? list.oldest : table_.At(block.older).newer) = block.newer;
  (block.newer == kNoBlock ? list.newest : table_.At(block.newer).older) = block.older;
  block.older = block.newer = kNoBlock;
  --list.size;
}

void EvictionOrder::Add(uint32_t number) {
  Block& block = table_.At(number);
  KVT_CHECK(!block.in_order, "block ", number);
  if (block.cls >= classes_.size()) classes_.resize(block.cls + 1);
  auto& [once, again] = classes_[block.cls];
  Append(block.hit_again ? again : once, number);
  block.in_order = true;
  ++size_;
  while (again.size * 100 > (once.size + again.size) * kProtectedPercent && again.size > 1) {
    const uint32_t oldest = again.oldest;
    Unlink(again, oldest);
    table_.At(oldest).hit_again = false;
    Append(once, oldest);
  }
}

void EvictionOrder::Remove(uint32_t number) {
  Block& block = table_.At(number);
  KVT_CHECK(block.in_order, "block ", number);
  Unlink(classes_[block.cls][block.hit_again ? 1 : 0], number);
  block.in_order = false;
  --size_;
}

}  // namespace kvt
