// Which blocks on the device hold the content of which key, complete, so that sequences with a
// common prefix share slots (DESIGN 5). PURE. Holds no reference: an entry goes when the block's last
// owner releases it.
//
// Thread-safety: none; the engine thread's.
#pragma once

#include <optional>

#include "absl/container/flat_hash_map.h"
#include "kernels/model/slot_pool.h"
#include "kvstore/index/block_key.h"

namespace kvt {

class SharedBlocks {
 public:
  // The bytes of every layer and plane are there. The first publisher of a key wins.
  void Publish(const BlockKey& key, PoolBlock block);
  [[nodiscard]] std::optional<PoolBlock> Find(const BlockKey& key) const;
  // The block's slots are freed. Unknown: nothing.
  void Forget(PoolBlock block);
  [[nodiscard]] size_t size() const { return by_key_.size(); }

 private:
  absl::flat_hash_map<BlockKey, PoolBlock> by_key_;
  absl::flat_hash_map<PoolBlock, BlockKey> by_block_;
};

}  // namespace kvt
