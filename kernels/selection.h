// Arguments of the operations that choose blocks for sparse attention (DESIGN 5): digests, scores,
// the best blocks. Shared by every backend.
//
// The digest of one block and layer is an entry of `digests`: entry i at digests + i * digest_bytes,
// the digests of the layer's selecting heads one after the other (kernels/layout/digest.h).
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/layout/digest.h"
#include "kernels/layout/geometry.h"
#include "kernels/paged_kv.h"

namespace kvt {

// One selecting head of a layer; offset and scale are device memory, [head_dim].
struct DigestHead {
  int kv_head = 0;
  const float* offset = nullptr;
  const float* scale = nullptr;  // > 0
};

// The selecting heads of a layer: host memory that stays valid until the operation has run.
struct DigestSpec {
  int bits = 4;
  absl::Span<const DigestHead> heads;  // at most kDigestHeadsMax; not empty

  [[nodiscard]] uint32_t Bytes(int head_dim) const {
    return static_cast<uint32_t>(heads.size()) * DigestHeadBytes(head_dim, bits);
  }
};

// digests[entry[i]] = the digest of the block whose slots of this layer are blocks[i]. A block
// without residual slot reads as BASE. Reads blocks x heads x 32 head_dim bytes, writes bits / 32 of
// it.
struct MakeDigestArgs {
  Geometry geometry;
  DigestSpec spec;
  const uint8_t* slots = nullptr;
  const SlotPair* blocks = nullptr;  // device, [count]
  const uint32_t* entries = nullptr;  // device, [count]; null: i
  int count = 0;
  uint8_t* digests = nullptr;
};

// One row to choose for. Block b of `blocks` is entries[b] of the digests.
struct ScoreSegment {
  const uint32_t* entries;  // device, [blocks]; null: first_entry + b
  uint32_t first_entry;     // where entries is null
  int blocks;               // of the middle; may be 0
  int row;                  // in q
  float* scores;            // device, [blocks]
};

// Exponentials are powers of two.
inline constexpr float kScoreLog2E = 1.44269504f;
// Exponentials of a row are summed in bursts of so many blocks, each burst below its own largest logit,
// by every backend: that order is what makes scores the same bits.
inline constexpr int kScoreBurstBlocks = 16;
[[nodiscard]] constexpr int ScoreBursts(int blocks) {
  return (blocks + kScoreBurstBlocks - 1) / kScoreBurstBlocks;
}

// scores[b] = mean over the selecting heads and the query heads of their groups of
// sum over the 16 tokens t of b of softmax over all tokens of `blocks`(scale * q . key(t)), where the
// keys are those of the digests and q is the query in 8 bits: q . key(t) is
// step * sum over d of q8[d] * code[t][d] (DigestQuantiseQuery; the sum is exact). So the scores of a
// row sum to 1. (What the codes leave out, offsets and centres, is the same for every token, and drops
// out of the softmax.)
// Bytes: one pass over the digests.
struct ScoreBlocksArgs {
  Geometry geometry;
  DigestSpec spec;
  int query_heads = 0;
  float scale = 0;
  const float* q = nullptr;  // f32 after rope; row r head h at q + r * q_stride + h * head_dim
  int q_stride = 0;
  const uint8_t* digests = nullptr;
  absl::Span<const ScoreSegment> segments;
};

// One row: the `count` (at most `blocks`) blocks of largest score, ascending by index; of equal
// scores the lower index is taken; a NaN ranks below every number.
struct SelectSegment {
  const float* scores;  // device, [blocks]
  int blocks;
  int count;
  int32_t* selected;  // device, [min(count, blocks)]: indices into scores
};
struct SelectTopBlocksArgs {
  absl::Span<const SelectSegment> segments;
  int blocks_max = 0;  // the most blocks of a segment
};

}  // namespace kvt
