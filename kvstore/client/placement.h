// Which store a block lives on (DESIGN 3): weighted rendezvous hashing over a cluster view, in
// groups. The first 64 blocks (1,024 tokens) of a sequence are one group, then 16 blocks (256
// tokens) each. Pure; thread-safe.
//
// 1. A group's owner depends on the key of the group's first block and on the stores' names and
//    weights alone: not on the prompt's length, not on the stores' order.
// 2. When a store leaves, only its groups move, each to the next in its order; when one joins, only
//    the groups that it now owns move.
//
// Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); weights
// by Schindelhauer and Schomaker's logarithmic method (score = weight / -ln(u)).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/base/limits.h"
#include "kvstore/index/block_key.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

inline constexpr int kFirstGroupBlocks = 64;
inline constexpr int kGroupBlocks = 16;
static_assert(kFirstGroupBlocks % kGroupBlocks == 0);

// Index of the first block of the group that `block` (an index in its sequence) belongs to.
constexpr int GroupStart(int block) {
  return block < kFirstGroupBlocks ? 0 : block - (block - kFirstGroupBlocks) % kGroupBlocks;
}
// Blocks of the group that starts at `group_start`.
constexpr int GroupSize(int group_start) {
  return group_start == 0 ? kFirstGroupBlocks : kGroupBlocks;
}

// Stores as indices into `stores`, the owner of the group first, then who takes its place when it is
// dead. Stores of weight 0 are left out. Empty when there is none.
[[nodiscard]] std::vector<int> RankStores(const BlockKey& group_key,
                                          absl::Span<const StoreRef> stores);

// The first of RankStores without allocating; -1 when there is none.
[[nodiscard]] int OwnerOf(const BlockKey& group_key, absl::Span<const StoreRef> stores);

}  // namespace kvt
