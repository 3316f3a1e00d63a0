// Named maxima of a store's index.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "kernels/base/limits.h"

namespace kvt {

// Models (fingerprint, numerics id and geometry) whose blocks a store holds or has held since boot.
inline constexpr size_t kStoreSpacesMax = 256;
// Record sizes in one arena.
inline constexpr size_t kRecordClassesMax = 64;
// Sharing domains seen since boot; their names are kept.
inline constexpr size_t kStoreDomainsMax = 64 * 1024;
// A tenant's name, a worker's name, a fingerprint, a numerics id.
inline constexpr size_t kStoreNameBytesMax = 1024;
// Workers whose leases ended, kept for the log between two ticks.
inline constexpr size_t kLapsedNamesMax = 32;
// Fenced epochs remembered of tickets that are gone.
inline constexpr size_t kFencedTicketsMax = static_cast<size_t>(kStoreTicketsMax);
// Sealed blocks that were hit by a second ticket are kept over those that were not, up to this
// share of what can be evicted.
inline constexpr uint64_t kProtectedPercent = 80;

// A model whose records fill fewer slabs than this share of the arena (one at least) takes slabs of
// models that have more, before its own cold blocks go: who comes late to a full arena does not stay
// at a slab.
inline constexpr uint64_t kClassFloorPart = 16;
// How long such slabs are not looked for again when there were none.
inline constexpr absl::Duration kFloorPause = absl::Seconds(1);

// Digests are given up after all KV while they hold at most this share of what is short: slabs of the
// arena, a tenant's quota, bytes of a disk. What they hold beyond it goes before KV.
inline constexpr uint64_t kDigestSharePart = 8;
// The same of block numbers: a digest takes one as a block of KV does.
inline constexpr uint64_t kDigestNumbersPart = 2;

// Records that a search for something to give up passes over, per list.
inline constexpr uint64_t kEvictionSkipsMax = 4096;

// The same when only blocks of one tenant will do.
inline constexpr uint64_t kTenantSkipsMax = 65536;

}  // namespace kvt
