// The copies at the ends of the data plane, each fused with the checksum of the slices it moves.
// All pure; the caller has checked sizes and alignment (burst_pool.h) and issues one
// StreamingFence() per batch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kvstore/transport/transport.h"
#include "kvstore/transport/transport_server.h"

namespace kvt {

// Scatters bytes [from, from + size) of `item`'s piece, which lie at `src`, into its parts with
// streaming stores. With checksums both ends of the range are slice boundaries; returns whether
// every slice had the expected one. `next`: null, or where the bytes lie that are scattered next:
// they are fetched a few KiB ahead of the copy, across the end of this range.
[[nodiscard]] bool ScatterRange(const PullItem& item, uint32_t slice_bytes, uint32_t from,
                                const std::byte* src, uint32_t size,
                                const std::byte* next = nullptr);

// Copies bytes [from, from + size) of `item`'s piece from its parts to `dst` with cached stores,
// and writes the slices' checksums into item.checksums when `compute`.
void GatherRange(const PushItem& item, uint32_t slice_bytes, uint32_t from, uint32_t size,
                 std::byte* dst, bool compute);

// Computes the checksums of that range without a copy.
void ChecksumRange(const PushItem& item, uint32_t slice_bytes, uint32_t from, uint32_t size);

// Copies a pushed piece to where it belongs with streaming stores; returns whether every slice had
// the checksum in `checksums` (empty: not checked).
[[nodiscard]] bool StorePiece(const ResolvedPush& to, const Piece& piece, const std::byte* src,
                              uint32_t slice_bytes, absl::Span<const uint64_t> checksums);

// Prefetches the start of every page of [data, data + size): hides the first misses of a cold
// random piece, which hardware prefetchers do not follow across pages.
void PrefetchPiece(const std::byte* data, uint32_t size);

}  // namespace kvt
