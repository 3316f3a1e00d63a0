// The store's side of the data plane. A server owns its connections and thread; what a piece is,
// and whether a session may have it, the store's PieceResolver says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/base/ids.h"
#include "kernels/layout/geometry.h"
#include "kvstore/transport/piece.h"
#include "kvstore/transport/transport.h"

namespace kvt {

// Where a piece to be pulled lies. `data` is aligned to kPieceAlignment and valid, with constant
// bytes, until ReleasePull.
struct ResolvedPull {
  const std::byte* data = nullptr;
  PieceStatus status = PieceStatus::kLost;
};

// Where a pushed piece goes, and what its checksums are seeded with. Written by the server until
// CommitPush.
struct ResolvedPush {
  std::byte* data = nullptr;
  uint64_t key_hash = 0;
  Plane plane = Plane::kBase;
  PieceStatus status = PieceStatus::kLost;
};

struct PushedPiece {
  Piece piece;
  // kOk: the bytes are there and verified. kCorrupt: bytes undefined, the write has ended.
  PieceStatus status = PieceStatus::kNotAttempted;
  // One per slice; empty when the client sends none.
  absl::Span<const uint64_t> checksums;
};

// Implemented by the store. Thread-safe: several servers (shared memory, ucx) call it at once, each
// from its own thread. Calls are short and do not block: they run on the progress thread.
class PieceResolver {
 public:
  virtual ~PieceResolver() = default;

  // Compares session, secret and geometry. PermissionDenied, FailedPrecondition (both geometries in
  // the message), ResourceExhausted. A session may attach several times.
  virtual absl::Status Attach(const SessionToken& token) = 0;
  // One attached connection of the session is gone; its pulls have been released.
  virtual void Detach(SessionId session) = 0;

  // Fills out[i] for pieces[i] and takes an in-flight count of each that is kOk. Checks the range.
  virtual void ResolvePull(SessionId session, absl::Span<const Piece> pieces,
                           absl::Span<ResolvedPull> out) = 0;
  // Ends the count of pieces that were kOk: exactly once for each, perhaps in other groups.
  virtual void ReleasePull(SessionId session, absl::Span<const Piece> pieces) = 0;

  // Fills out[i] for pieces[i] and takes an in-flight count of each that is kOk.
  virtual void ResolvePush(SessionId session, absl::Span<const Piece> pieces,
                           absl::Span<ResolvedPush> out) = 0;
  // Ends that count: exactly once for each piece that was kOk. verdicts[i] starts as
  // pieces[i].status and may be lowered (the record went meanwhile); the client gets it. A piece
  // may come twice (a retry): the same bytes, idempotent.
  virtual void CommitPush(SessionId session, absl::Span<const PushedPiece> pieces,
                          absl::Span<PieceStatus> verdicts) = 0;
};

struct TransportServerStats {
  uint32_t connections = 0;
  uint64_t attaches_refused = 0;
  uint64_t messages_refused = 0;  // malformed, oversized or unknown; the connection is closed
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t forced_closes = 0;
};

// Owned by the store's composition root; the resolver and the memory it points to outlive it.
// Thread-safe. The destructor stops it.
class TransportServer {
 public:
  virtual ~TransportServer() = default;
  // What clients connect to: "ucx:127.0.0.1:40123", "shm:/run/kvtide/store-0.sock",
  // "loopback:name".
  [[nodiscard]] virtual std::string Address() const = 0;
  // Refuses new connections, closes the others, releases every pull, joins. Idempotent.
  virtual void Stop() = 0;
  [[nodiscard]] virtual TransportServerStats Stats() const = 0;
};

}  // namespace kvt
