// The name of a block's content (DESIGN 3): 128 bits of HMAC-SHA-256, keyed by the cluster secret,
// over the parent's key and everything that the block's KV depends on. Pure; thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/base/ids.h"
#include "kernels/layout/geometry.h"

namespace kvt {

struct BlockKey {
  std::array<uint8_t, 16> bytes{};
  friend auto operator<=>(const BlockKey&, const BlockKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockKey& key) {
    return H::combine(std::move(h), key.bytes);
  }
  // The first 64 bits, little-endian: seed of checksums and of rendezvous hashing.
  [[nodiscard]] uint64_t Hash64() const;
  [[nodiscard]] std::string ToHex() const;
};

// How the KV of a sequence was computed, worst step so far (DESIGN 3). A reader of kExact accepts
// kExact only; kBase: exact and base; kSparse: all.
enum class Provenance : uint8_t { kExact = 0, kBase = 1, kSparse = 2 };

// What every key of one sequence shares.
struct KeyDomain {
  std::string cluster_secret;
  std::string model_fingerprint;
  std::string numerics_id;
  Geometry geometry;
  std::string tenant;  // "" is the shared domain
  std::string salt;    // adapter
};

class KeyMac;

// Computes keys along a sequence. Thread-safe; cheap to copy.
class KeyChain {
 public:
  explicit KeyChain(const KeyDomain& domain);
  [[nodiscard]] BlockKey Root() const { return root_; }
  // Key of the full block of 16 `tokens` that follows `parent`.
  [[nodiscard]] BlockKey Next(const BlockKey& parent, absl::Span<const int32_t> tokens,
                              Provenance provenance) const;
  // Key of a block that only `ticket` may read: a partial tail (1..16 tokens) or approximate KV.
  [[nodiscard]] BlockKey NextPrivate(const BlockKey& parent, absl::Span<const int32_t> tokens,
                                     Provenance provenance, TicketId ticket) const;
  // Keys of all full blocks of `tokens` from position 0, kExact.
  [[nodiscard]] std::vector<BlockKey> Prefix(absl::Span<const int32_t> tokens) const;

 private:
  std::shared_ptr<const KeyMac> mac_;
  BlockKey root_;
};

}  // namespace kvt
