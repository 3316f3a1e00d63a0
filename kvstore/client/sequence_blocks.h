// The names of a sequence's blocks along its tokens: what Lookup and Reserve are asked with. Pure;
// not thread-safe (one owner: the request).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/base/ids.h"
#include "kvstore/index/block_key.h"
#include "kvstore/wire/store_api.h"

namespace kvt {

// A block as the tier client wants it: its name and the key that decides its owner.
struct TierBlock {
  BlockName name;
  BlockKey group_key;  // key of its group's first block (kvstore/client/placement.h)
};

// Full blocks of a sequence from position 0, and on demand its partial tail.
class SequenceBlocks {
 public:
  SequenceBlocks(const KeyChain& chain, TicketId ticket) : chain_(chain), ticket_(ticket) {}

  // Without tokens, of the same chain and ticket.
  [[nodiscard]] SequenceBlocks Empty() const { return SequenceBlocks(chain_, ticket_); }

  // The full blocks of the same tokens and provenance, named by another chain.
  [[nodiscard]] SequenceBlocks Under(const KeyChain& chain) const;

  // Adds tokens behind those already there. Blocks completed by them get names; `provenance` is
  // inherited: a block's is the worst of its own and its parent's. Names of blocks that are not kExact
  // hold no ticket: the store keeps them for theirs while it lives and publishes them then (DESIGN 3).
  void Append(absl::Span<const int32_t> tokens, Provenance provenance = Provenance::kExact);

  [[nodiscard]] int64_t tokens() const { return static_cast<int64_t>(tokens_.size()); }
  [[nodiscard]] absl::Span<const int32_t> token_ids() const { return tokens_; }
  // Full blocks, in order.
  [[nodiscard]] absl::Span<const TierBlock> blocks() const { return blocks_; }
  // Of all blocks.
  [[nodiscard]] Provenance worst() const {
    return blocks_.empty() ? pending_ : std::max(pending_, blocks_.back().name.provenance);
  }
  // Tokens of the first block that is not exact, and of all behind it.
  [[nodiscard]] uint32_t approximate_tokens() const;
  // Leading ones that are exact.
  [[nodiscard]] int exact_blocks() const;
  // Blocks whose reuse still leaves a token to compute logits from: floor((tokens - 1) / 16).
  [[nodiscard]] int reusable_blocks() const;
  // The ticket-private block of the tokens behind the last full block; requires that there are any.
  [[nodiscard]] TierBlock Tail() const;
  [[nodiscard]] bool HasTail() const { return tokens() % kBlockTokens != 0; }

 private:
  [[nodiscard]] TierBlock Make(int index, absl::Span<const int32_t> tokens, Provenance provenance,
                               bool ticket_private) const;

  KeyChain chain_;
  TicketId ticket_;
  std::vector<int32_t> tokens_;
  std::vector<TierBlock> blocks_;
  Provenance pending_ = Provenance::kExact;  // worst of the tokens behind the last full block
};

}  // namespace kvt
