#include "kvstore/client/sequence_blocks.h"

#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kvstore/client/placement.h"

namespace kvt {
namespace {

KeyChain Chain() {
  KeyDomain domain;
  domain.cluster_secret = "0123456789abcdef";
  domain.model_fingerprint = "f";
  domain.numerics_id = "n";
  domain.geometry = Geometry{.layers = 2, .kv_heads = 1, .head_dim = 64};
  return KeyChain(domain);
}

std::vector<int32_t> Tokens(int count) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 100);
  return tokens;
}

TEST(SequenceBlocks, Append_InAnySplit_GivesTheSameNames) {
  const std::vector<int32_t> tokens = Tokens(100);
  SequenceBlocks whole(Chain(), TicketId(1));
  whole.Append(tokens);
  SequenceBlocks pieces(Chain(), TicketId(2));
  for (size_t i = 0; i < tokens.size(); i += 7) {
    pieces.Append(absl::MakeConstSpan(tokens).subspan(i, 7));
  }
  ASSERT_EQ(whole.blocks().size(), 6u);
  ASSERT_EQ(pieces.blocks().size(), 6u);
  const std::vector<BlockKey> keys = Chain().Prefix(tokens);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(whole.blocks()[i].name.key, keys[i]);
    EXPECT_EQ(pieces.blocks()[i].name.key, keys[i]);
    EXPECT_EQ(whole.blocks()[i].name.parent, i == 0 ? Chain().Root() : keys[i - 1]);
    EXPECT_EQ(whole.blocks()[i].name.tokens.front(), 100 + static_cast<int>(i) * 16);
    EXPECT_FALSE(whole.blocks()[i].name.ticket_private);
  }
}

TEST(SequenceBlocks, GroupKey_OfABlock_IsItsGroupsFirstKeyWhateverFollows) {
  SequenceBlocks shorter(Chain(), TicketId(1));
  shorter.Append(Tokens(16 * 70));
  SequenceBlocks longer(Chain(), TicketId(1));
  longer.Append(Tokens(16 * 200));
  for (int i = 0; i < 70; ++i) {
    EXPECT_EQ(shorter.blocks()[i].group_key, longer.blocks()[i].group_key);
  }
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(longer.blocks()[i].group_key, longer.blocks()[GroupStart(i)].name.key);
  }
}

TEST(SequenceBlocks, Tail_IsPrivateToItsTicket) {
  SequenceBlocks a(Chain(), TicketId(1));
  SequenceBlocks b(Chain(), TicketId(2));
  a.Append(Tokens(40));
  b.Append(Tokens(40));
  ASSERT_TRUE(a.HasTail());
  EXPECT_EQ(a.Tail().name.tokens.size(), 8u);
  EXPECT_TRUE(a.Tail().name.ticket_private);
  EXPECT_NE(a.Tail().name.key, b.Tail().name.key);
  EXPECT_EQ(a.Tail().name.parent, a.blocks()[1].name.key);
  EXPECT_EQ(a.Tail().group_key, a.blocks()[0].name.key);
  a.Append(Tokens(8));
  EXPECT_FALSE(a.HasTail());
}

TEST(SequenceBlocks, Reusable_AlwaysLeavesATokenToCompute) {
  for (const auto& [tokens, blocks] : std::vector<std::pair<int, int>>{
           {0, 0}, {1, 0}, {16, 0}, {17, 1}, {32, 1}, {33, 2}}) {
    SequenceBlocks sequence(Chain(), TicketId(1));
    sequence.Append(Tokens(tokens));
    EXPECT_EQ(sequence.reusable_blocks(), blocks) << tokens;
  }
}

TEST(SequenceBlocks, Provenance_IsInheritedByEveryLaterBlock) {
  SequenceBlocks sequence(Chain(), TicketId(1));
  const std::vector<int32_t> tokens = Tokens(64);
  const auto span = absl::MakeConstSpan(tokens);
  sequence.Append(span.subspan(0, 16));
  sequence.Append(span.subspan(16, 8), Provenance::kBase);
  sequence.Append(span.subspan(24, 40));  // exact again, but over approximate KV
  ASSERT_EQ(sequence.blocks().size(), 4u);
  EXPECT_EQ(sequence.blocks()[0].name.provenance, Provenance::kExact);
  EXPECT_FALSE(sequence.blocks()[0].name.ticket_private);
  for (int i = 1; i < 4; ++i) {
    EXPECT_EQ(sequence.blocks()[i].name.provenance, Provenance::kBase);
    EXPECT_FALSE(sequence.blocks()[i].name.ticket_private);
  }
  EXPECT_EQ(sequence.exact_blocks(), 1);
  EXPECT_EQ(sequence.worst(), Provenance::kBase);
}

TEST(SequenceBlocks, ApproximateNames_AreEqualForEveryTicketAndDifferByProvenance) {
  const std::vector<int32_t> tokens = Tokens(48);
  const auto names = [&](uint64_t ticket, Provenance provenance) {
    SequenceBlocks sequence(Chain(), TicketId(ticket));
    sequence.Append(absl::MakeConstSpan(tokens).first(16));
    sequence.Append(absl::MakeConstSpan(tokens).subspan(16), provenance);
    std::vector<BlockKey> keys;
    for (const TierBlock& block : sequence.blocks()) keys.push_back(block.name.key);
    return keys;
  };
  EXPECT_EQ(names(1, Provenance::kSparse), names(2, Provenance::kSparse));
  const auto exact = names(1, Provenance::kExact), base = names(1, Provenance::kBase),
             sparse = names(1, Provenance::kSparse);
  EXPECT_EQ(exact[0], sparse[0]);
  for (int i = 1; i < 3; ++i) {
    EXPECT_NE(exact[i], sparse[i]);
    EXPECT_NE(exact[i], base[i]);
    EXPECT_NE(base[i], sparse[i]);
  }
}

}  // namespace
}  // namespace kvt
