// The inner loops of ScoreBlocks, implemented for each instruction set.
//
// A row's blocks are scored in bursts of kScoreBurstBlocks, so that sums over the tokens of a block are
// made for 16 blocks in one vector. Logits are integers, exact, the same on every instruction set; so are,
// by equal order of the same operations, the sums of exponentials.
#pragma once

#include <cstdint>

#include "kernels/selection.h"

namespace kvt {

// Queries that meet one load of codes.
inline constexpr int kScoreQueriesMax = 4;

// What the first phase leaves of one query of a row; arrays are 64-byte aligned.
struct QueryParts {
  float* sums;        // [burst][kScoreBurstBlocks]: of 2^(step2 * (logit - max)) over a block's tokens
  int32_t* max;       // [burst]: the largest logit
  float* step2;       // log2(e) * scale * step of the query, written with burst 0
};

// The queries of one head over the blocks of one row.
struct ScoreTask {
  const int8_t* q = nullptr;      // [queries][head_dim]
  const float* step2 = nullptr;   // [queries]
  const QueryParts* parts = nullptr;  // [queries]
  int queries = 0;
  int head_dim = 0;
  int bits = 0;
  // The head's digest of block b begins at digests + stride * (entries[b], or first_entry + b).
  const uint8_t* digests = nullptr;
  uint32_t stride = 0;
  const uint32_t* entries = nullptr;
  uint32_t first_entry = 0;
  int blocks = 0;  // of the row
};

struct ScoreIsa {
  const char* name;
  // Logits of queries [first, first + count), count <= kScoreQueriesMax, in a burst:
  // [query][block of the burst][token], 64-byte aligned. Those of blocks past the row's are unset.
  void (*logits)(const ScoreTask& task, int first, int count, int burst, int32_t* logits);
  // The parts of bursts [begin, end) of all queries.
  void (*score)(const ScoreTask& task, int begin, int end);
  // One query over all blocks of a row: scores[b] = or += (add) its share of the softmax's mass / queries.
  void (*combine)(const QueryParts& parts, int blocks, int queries, bool add, float* scores);
};
extern const ScoreIsa kScoreIsaAvx2;
extern const ScoreIsa kScoreIsaAvx512;
extern const ScoreIsa kScoreIsaVnni;

}  // namespace kvt
