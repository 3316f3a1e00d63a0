#include "decode_worker/pool/shared_blocks.h"

namespace kvt {

void SharedBlocks::Publish(const BlockKey& key, PoolBlock block) {
  if (by_block_.contains(block)) return;
  if (by_key_.emplace(key, block).second) by_block_.emplace(block, key);
}

std::optional<PoolBlock> SharedBlocks::Find(const BlockKey& key) const {
  const auto it = by_key_.find(key);
  if (it == by_key_.end()) return std::nullopt;
  return it->second;
}

void SharedBlocks::Forget(PoolBlock block) {
  const auto it = by_block_.find(block);
  if (it == by_block_.end()) return;
  by_key_.erase(it->second);
  by_block_.erase(it);
}

}  // namespace kvt
