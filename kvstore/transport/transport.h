// The client's side of the data plane: bursts of pieces between a worker's memory and one store.
//
//   Transport (loopback, shared memory, ucx) --Connect--> Channel --Pull/Push--> completion
//
// Every operation ends: completion, typed failure, or deadline. The completion callback comes
// exactly once for every accepted burst, and only when the transport touches none of the burst's
// memory any more. Deadlines are times of RealClock (kernels/base/clock.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/ids.h"
#include "kernels/layout/geometry.h"
#include "kvstore/transport/limits.h"
#include "kvstore/transport/piece.h"

namespace kvt {

using SessionSecret = std::array<uint8_t, 16>;

// Proof, from the store's control service, that this worker holds a session there, and what it
// believes of the data: compared at attach, a difference refuses the channel with both sides named.
struct SessionToken {
  SessionId session;
  SessionSecret secret{};
  Geometry geometry;
};

// Pull one piece into `piece.length / part_bytes` destinations of part_bytes each: a piece of 30
// layers goes to 30 slots. part_bytes divides the length and is a multiple of kPieceAlignment;
// destinations are aligned to kPieceAlignment.
struct PullItem {
  Piece piece;
  std::byte* const* parts = nullptr;
  uint32_t part_bytes = 0;
  // Expected checksums, one per slice of Geometry::SliceBytes() (ChecksumSeed: key_hash, plane,
  // slice = piece.offset / slice bytes + i); null: not checked. With them offset, length and
  // part_bytes are multiples of the slice.
  const uint64_t* checksums = nullptr;
  uint64_t key_hash = 0;
  Plane plane = Plane::kBase;
};

enum class PushChecksums : uint8_t {
  kNone,     // the store keeps none: for tests
  kGiven,    // `checksums` are the caller's
  kCompute,  // the channel computes them while it sends and fills `checksums` in
};

// Push one piece from `piece.length / part_bytes` sources. The store verifies and keeps the
// checksums (seeded as above).
struct PushItem {
  Piece piece;
  const std::byte* const* parts = nullptr;
  uint32_t part_bytes = 0;
  uint64_t* checksums = nullptr;
  uint64_t key_hash = 0;
  Plane plane = Plane::kBase;
};

struct BurstResult {
  // Ok: every piece has a verdict. DeadlineExceeded, Cancelled, Unavailable (peer dead or channel
  // closed), Internal: pieces without verdict are kNotAttempted.
  absl::Status status;
  uint32_t pieces_ok = 0;
  uint32_t pieces_missed = 0;  // any other verdict
  uint64_t bytes = 0;          // of the pieces that are kOk
};

// Runs on a transport thread: must only enqueue. It may submit to the channel; it must not destroy
// it. Captures of up to 16 trivially copyable bytes do not allocate.
using BurstDone = std::function<void(const BurstResult&)>;

// All arrays are borrowed until `done` has been called.
struct PullRequest {
  absl::Span<const PullItem> items;
  absl::Span<PieceStatus> statuses;  // one per item, written before `done`
  absl::Time deadline;
  BurstDone done;
};

struct PushRequest {
  absl::Span<const PushItem> items;
  absl::Span<PieceStatus> statuses;
  PushChecksums checksums = PushChecksums::kCompute;
  absl::Time deadline;
  BurstDone done;
};

using BurstId = StrongId<struct BurstTag>;

struct ChannelStats {
  uint64_t bytes_pulled = 0;
  uint64_t bytes_pushed = 0;
  uint64_t bursts = 0;  // finished
  uint64_t pieces_missed = 0;
  uint32_t bursts_in_flight = 0;
};

// One connection to one store. Thread-safe. The destructor closes it and returns when every
// callback has run; it must not run on a transport thread.
class Channel {
 public:
  virtual ~Channel() = default;

  // Accepts the burst or refuses it without calling `done`: InvalidArgument (sizes, alignment),
  // ResourceExhausted (kChannelBurstsMax accepted: retry after a completion), Unavailable (closed
  // or the peer is dead: connect again). Never blocks. An empty burst completes at once.
  virtual absl::StatusOr<BurstId> Pull(PullRequest request) = 0;
  virtual absl::StatusOr<BurstId> Push(PushRequest request) = 0;
  // Ends the burst with Cancelled unless it has ended; other bursts go on. Never blocks.
  virtual void Cancel(BurstId burst) = 0;
  // Ends every burst with Unavailable, refuses new ones, and returns when all callbacks have run.
  virtual void Close() = 0;
  // False once the peer is known to be dead, a deadline forced the close, or after Close().
  [[nodiscard]] virtual bool IsOpen() const = 0;
  [[nodiscard]] virtual ChannelStats Stats() const = 0;
};

// Makes channels. Owned by a composition root; outlives its channels. Thread-safe.
class Transport {
 public:
  virtual ~Transport() = default;
  // "ucx", "shm", "loopback": the scheme of the addresses it takes.
  [[nodiscard]] virtual absl::string_view Scheme() const = 0;
  // Connects and attaches, at most until `deadline`. `address` is a TransportServer's Address().
  // Unavailable (nobody there, too many connections), PermissionDenied (unknown session or wrong
  // secret), FailedPrecondition (geometry, version or settings differ: both named),
  // DeadlineExceeded.
  virtual absl::StatusOr<std::unique_ptr<Channel>> Connect(absl::string_view address,
                                                           const SessionToken& token,
                                                           absl::Time deadline) = 0;
};

}  // namespace kvt
