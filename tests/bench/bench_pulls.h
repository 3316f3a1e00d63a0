// What the benchmarks pull from a BenchStore: scattered pieces, their destinations and checksums, made
// before anything is timed, and the runs over a channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kvstore/transport/transport.h"
#include "tests/bench/bench_store.h"

namespace kvt {

enum class PieceChoice {
  kScattered,  // any layer of any record, each once
  kBase,       // layers of BASE records
  kTarget,     // the same blocks and layers as kBase, RESIDUAL beside BASE: twice the pieces
};

struct PullSetOptions {
  uint32_t burst_pieces = 512;
  uint32_t bursts = 1;
  PieceChoice choice = PieceChoice::kScattered;
};

// The pieces of some bursts. `pool` is memory of the destinations, shared with other sets. When it is
// smaller than the set, destinations are used again (whole bursts apart).
class PullSet {
 public:
  PullSet(const SizeCase& size, const BenchStore& store, absl::Span<std::byte> pool,
          const PullSetOptions& options);

  [[nodiscard]] uint32_t bursts() const { return options_.bursts; }
  [[nodiscard]] uint32_t burst_pieces() const { return options_.burst_pieces; }
  [[nodiscard]] uint32_t pieces() const { return static_cast<uint32_t>(items_.size()); }
  [[nodiscard]] uint64_t bytes() const { return items_.size() * uint64_t{piece_bytes_}; }
  [[nodiscard]] uint32_t piece_bytes() const { return piece_bytes_; }
  [[nodiscard]] absl::Span<const PullItem> Items(uint32_t first, uint32_t count,
                                                 bool checked) const {
    return absl::MakeConstSpan(checked ? checked_ : items_).subspan(first, count);
  }
  // Of burst `b`: where its pieces lie in the arena, and go.
  [[nodiscard]] absl::Span<const uint64_t> Offsets(uint32_t b) const {
    return absl::MakeConstSpan(offsets_).subspan(b * options_.burst_pieces, options_.burst_pieces);
  }
  [[nodiscard]] absl::Span<std::byte* const> Destinations(uint32_t b) const {
    return absl::MakeConstSpan(destinations_)
        .subspan(b * options_.burst_pieces, options_.burst_pieces);
  }
  [[nodiscard]] absl::Span<PieceStatus> Statuses(uint32_t first, uint32_t count) {
    return absl::MakeSpan(statuses_).subspan(first, count);
  }
  void Wipe();
  // Dies unless every destination holds its piece (the last that was pulled there).
  void Verify() const;

 private:
  const PullSetOptions options_;
  const uint32_t piece_bytes_;
  std::vector<StoredRecord> records_;  // by item
  std::vector<PullItem> items_, checked_;
  std::vector<std::byte*> destinations_;
  std::vector<uint64_t> offsets_;
  std::vector<uint64_t> checksums_;
  std::vector<PieceStatus> statuses_;
};

struct PullRunOptions {
  bool checked = true;
  uint32_t pieces = 0;       // of one burst; 0: the set's
  uint32_t outstanding = 1;  // bursts
  uint32_t total = 0;        // pieces in all; 0: the set's
};
// Each burst is submitted by the callback of an earlier one. Returns the time spent in Channel::Pull.
absl::Duration RunPulls(Channel& channel, PullSet& set, const PullRunOptions& options);

// Pulls `count` single pieces one after the other, each submitted by this thread `pause` after the one
// before; microseconds from before Channel::Pull to the callback.
std::vector<double> SinglePullMicroseconds(Channel& channel, PullSet& set, uint32_t count,
                                           absl::Duration pause);

}  // namespace kvt
