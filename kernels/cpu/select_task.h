// The inner loop of ScoreBlocks, implemented for each instruction set.
#pragma once

#include <cstdint>

#include "kernels/layout/digest.h"

namespace kvt {

// Queries that one task scores at once.
inline constexpr int kScoreQueriesMax = 4;

// The parts of one block for one query.
struct BlockPart {
  float max;  // of the 16 logits
  float sum;  // of exp(logit - max)
};

struct ScoreTask {
  const float* q = nullptr;  // [queries][head_dim], scaled: logit = sum over d of q[d] * code[d]
  int queries = 0;           // in [1, kScoreQueriesMax]
  int head_dim = 0;
  int bits = 0;
};

// parts[query * stride] for one block's digest of the task's head.
using ScoreBlockFn = void (*)(const ScoreTask& task, const uint8_t* digest, BlockPart* parts,
                              int stride);

// One query over all blocks of a row: scores[b] += the softmax's share of block b, over `queries` in all.
using ScoreCombineFn = void (*)(const BlockPart* parts, int blocks, int queries, float* scores);

struct ScoreIsa {
  const char* name;
  ScoreBlockFn block;
  ScoreCombineFn combine;
};
extern const ScoreIsa kScoreIsaAvx2;
extern const ScoreIsa kScoreIsaAvx512;

}  // namespace kvt
