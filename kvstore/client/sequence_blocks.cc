#include "kvstore/client/sequence_blocks.h"

#include <algorithm>

#include "kernels/base/check.h"
#include "kvstore/client/placement.h"

namespace kvt {

void SequenceBlocks::Append(absl::Span<const int32_t> tokens, Provenance provenance) {
  for (const int32_t token : tokens) {
    tokens_.push_back(token);
    pending_ = std::max(pending_, provenance);
    if (tokens_.size() % kBlockTokens != 0) continue;
    const int index = static_cast<int>(blocks_.size());
    const absl::Span<const int32_t> ids =
        absl::MakeConstSpan(tokens_).subspan(tokens_.size() - kBlockTokens);
    if (!blocks_.empty()) pending_ = std::max(pending_, blocks_.back().name.provenance);
    blocks_.push_back(Make(index, ids, pending_, /*ticket_private=*/false));
    pending_ = Provenance::kExact;
  }
}

SequenceBlocks SequenceBlocks::Under(const KeyChain& chain) const {
  SequenceBlocks names(chain, ticket_);
  for (const TierBlock& block : blocks_) names.Append(block.name.tokens, block.name.provenance);
  return names;
}

uint32_t SequenceBlocks::approximate_tokens() const {
  const int exact = exact_blocks();
  if (exact == static_cast<int>(blocks_.size()) && pending_ == Provenance::kExact) return 0;
  return static_cast<uint32_t>(tokens_.size()) - static_cast<uint32_t>(exact) * kBlockTokens;
}

int SequenceBlocks::exact_blocks() const {
  const auto first = std::find_if(blocks_.begin(), blocks_.end(), [](const TierBlock& block) {
    return block.name.provenance != Provenance::kExact;
  });
  return static_cast<int>(first - blocks_.begin());
}

int SequenceBlocks::reusable_blocks() const {
  return tokens_.empty() ? 0 : static_cast<int>((tokens_.size() - 1) / kBlockTokens);
}

TierBlock SequenceBlocks::Tail() const {
  KVT_CHECK(HasTail(), "tokens=", tokens());
  const size_t first = blocks_.size() * kBlockTokens;
  Provenance provenance = pending_;
  if (!blocks_.empty()) provenance = std::max(provenance, blocks_.back().name.provenance);
  return Make(static_cast<int>(blocks_.size()), absl::MakeConstSpan(tokens_).subspan(first),
              provenance, /*ticket_private=*/true);
}

TierBlock SequenceBlocks::Make(int index, absl::Span<const int32_t> tokens, Provenance provenance,
                               bool ticket_private) const {
  TierBlock block;
  block.name.parent = index == 0 ? chain_.Root() : blocks_[index - 1].name.key;
  block.name.key = ticket_private
                       ? chain_.NextPrivate(block.name.parent, tokens, provenance, ticket_)
                       : chain_.Next(block.name.parent, tokens, provenance);
  block.name.tokens.assign(tokens.begin(), tokens.end());
  block.name.provenance = provenance;
  block.name.ticket_private = ticket_private;
  const int group = GroupStart(index);
  block.group_key = group == index ? block.name.key : blocks_[group].name.key;
  return block;
}

}  // namespace kvt
