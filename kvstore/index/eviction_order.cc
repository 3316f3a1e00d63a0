#include "kvstore/index/eviction_order.h"

#include "kernels/base/check.h"
#include "kvstore/index/limits.h"

namespace kvt {

void EvictionOrder::Append(List& list, uint32_t number, size_t links) {
  BlockLinks& own = table_.At(number).links[links];
  own.newer = kNoBlock;
  own.older = list.newest;
  (list.newest == kNoBlock ? list.oldest : table_.At(list.newest).links[links].newer) = number;
  list.newest = number;
  ++list.size;
}

void EvictionOrder::Unlink(List& list, uint32_t number, size_t links) {
  BlockLinks& own = table_.At(number).links[links];
  (own.older == kNoBlock ? list.oldest : table_.At(own.older).links[links].newer) = own.newer;
  (own.newer == kNoBlock ? list.newest : table_.At(own.newer).links[links].older) = own.older;
  own.older = own.newer = kNoBlock;
  --list.size;
}

void EvictionOrder::Move(uint32_t number, size_t links, ListKind to) {
  Block& block = table_.At(number);
  ListKind& kind = block.list[links];
  if (kind == to) return;
  if (kind != ListKind::kNone) {
    Unlink(ListOf(block, links, kind), number, links);
    --size_;
  }
  kind = to;
  if (to == ListKind::kNone) return;
  Append(ListOf(block, links, to), number, links);
  ++size_;
  if (links == kDiskLinks || to != ListKind::kAgain) return;
  List& once = ListOf(block, links, ListKind::kOnce);
  List& again = ListOf(block, links, ListKind::kAgain);
  while (again.size * 100 > (once.size + again.size) * kProtectedPercent && again.size > 1) {
    const uint32_t oldest = again.oldest;
    Unlink(again, oldest, links);
    Block& demoted = table_.At(oldest);
    demoted.list[links] = ListKind::kOnce;
    if (links == static_cast<size_t>(Plane::kBase)) demoted.hit_again = false;
    Append(once, oldest, links);
  }
}

void EvictionOrder::Place(uint32_t number) {
  const Block& block = table_.At(number);
  KVT_CHECK(block.state == BlockState::kSealed, "block ", number);
  if (block.cls >= classes_.size()) classes_.resize(block.cls + 1);
  const bool held = block.IsHeld();
  for (size_t plane = 0; plane < kPlanes; ++plane) {
    ListKind to = ListKind::kNone;
    if (block.offset[plane] == kNoOffset) {
      to = ListKind::kNone;
    } else if (held) {
      to = ListKind::kHeld;
    } else if (block.list[plane] == ListKind::kOnce || block.list[plane] == ListKind::kAgain) {
      continue;  // where it is, it keeps its age
    } else {
      to = block.hit_again ? ListKind::kAgain : ListKind::kOnce;
    }
    Move(number, plane, to);
  }
  const bool on_disk = (block.on_disk[0] || block.on_disk[1]) && !held;
  Move(number, kDiskLinks, on_disk ? ListKind::kOnce : ListKind::kNone);
}

void EvictionOrder::Remove(uint32_t number) {
  for (size_t links = 0; links < kBlockLists; ++links) Move(number, links, ListKind::kNone);
}

}  // namespace kvt
