// Named maxima of queues, batches and messages. Related ones are tied by static_assert.
#pragma once

#include <cstdint>

#include "kernels/base/units.h"

namespace kvt {

// Tokens of one block (DESIGN 1). Baked into layouts, keys and kernels.
inline constexpr int kBlockTokens = 16;

// Longest sequence (prompt and output) of any model served.
inline constexpr int kSequenceTokensMax = 128 * 1024;
inline constexpr int kSequenceBlocksMax = kSequenceTokensMax / kBlockTokens;

// Pieces of one PULL or PUSH; longer lists are split by the client.
inline constexpr int kBurstPiecesMax = 64 * 1024;

// Requests a worker holds at once, in any state.
inline constexpr int kWorkerRequestsMax = 1024;
// Rows of one decode batch.
inline constexpr int kDecodeBatchMax = 64;
// Tokens of one prefill chunk.
inline constexpr int kPrefillChunkTokensMax = 512;
static_assert(kPrefillChunkTokensMax % kBlockTokens == 0);

// gRPC message ceiling: token ids and block metadata of the longest sequence fit.
inline constexpr int kControlMessageBytesMax = 64 * static_cast<int>(kMiB);
static_assert(kSequenceTokensMax * 8 < kControlMessageBytesMax);

// Sessions (worker boots) and tickets a store holds.
inline constexpr int kStoreSessionsMax = 1024;
inline constexpr int kStoreTicketsMax = 64 * 1024;

}  // namespace kvt
