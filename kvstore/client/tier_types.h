// What a worker says to and hears from TierClient.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/base/ids.h"
#include "kernels/layout/geometry.h"
#include "kvstore/client/sequence_blocks.h"
#include "kvstore/wire/store_api.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

// A ticket as its holder keeps it: the signed form travels, the decoded one is read.
struct HeldTicket {
  SignedTicket signed_ticket;
  Ticket ticket;
  [[nodiscard]] TicketRef ref() const { return {ticket.id, ticket.epoch}; }
};

// A store as TierClient numbers it; stable for the client's life. kNoStore: none.
inline constexpr uint32_t kNoStore = UINT32_MAX;

// A block at a store: pinned (Lookup) or reserved (Reserve) for its ticket until Release. Valid in
// one incarnation of the client's session there; later every transfer of it is kLost.
struct PlacedBlock {
  BlockPresence presence = BlockPresence::kAbsent;
  uint32_t store = kNoStore;
  uint64_t incarnation = 0;
  uint64_t key_hash = 0;  // BlockKey::Hash64(): seeds the checksums
  BlockPlace place;
  [[nodiscard]] bool has_base() const { return presence != BlockPresence::kAbsent; }
  [[nodiscard]] bool has_residual() const { return presence == BlockPresence::kExact; }
  // A plane of it lies on the store's disk alone: a pull has to wait for it.
  [[nodiscard]] bool on_disk() const { return place.base_on_disk || place.residual_on_disk; }
};

// How far Lookup looks for a block that its owners do not have.
enum class LookupReach : uint8_t {
  // Its owner in the ticket's placement, in the current view and in the previous one: what a new
  // prompt may reuse.
  kOwners = 0,
  // Then every other store of those views: for the blocks of a ticket that a peer has just written.
  // The peer's links may be down where ours are up, and then the blocks lie with the next in order.
  kEveryStore = 1,
};

struct LookupResult {
  std::vector<PlacedBlock> blocks;  // as asked; kAbsent where no store has it
  // In memory or on disk alike.
  int exact_blocks = 0;  // leading blocks with both planes
  int base_blocks = 0;   // leading blocks with at least the BASE plane (>= exact_blocks)
  std::vector<NodeName> unreachable;  // owners that were skipped or did not answer in time
};

// What Reserve does when one store refuses.
enum class ReserveMode : uint8_t {
  // Everything the ticket has in any store of this client is let go (pins of Lookup too) and the
  // refusal is returned: the ticket goes back to the queue. For admission.
  kAllOrNothing = 0,
  // What was refused comes back kAbsent; the rest stays. For write-back.
  kKeepGranted = 1,
};

// How a Reserve is made.
struct ReserveTerms {
  ReserveTerms(ReserveMode mode_in) : mode(mode_in) {}  // NOLINT: a mode alone is the usual case
  ReserveMode mode;
  // Greater than zero, with kAllOrNothing: the ticket is aged, it has been refused for so long. On a
  // refusal it keeps what it was granted at the stores before the one that refused, and there, when
  // it is its turn, what there is; of the stores behind it everything is let go. Stores are asked in
  // one order by all, so no two tickets wait for each other. To be asked again within a second, or
  // Released.
  absl::Duration waited;
  // No store is asked beyond it (RealClock): DeadlineExceeded, everything let go.
  absl::Time deadline = absl::InfiniteFuture();
};

struct ReserveResult {
  // As asked. already_sealed[i]: another writer was first; the block is pinned, nothing to push.
  std::vector<PlacedBlock> blocks;
  std::vector<bool> already_sealed;
  int refused = 0;  // kKeepGranted: blocks that came back kAbsent
};

enum class TransferOutcome : uint8_t {
  kOk = 0,
  kLost = 1,     // gone, corrupt, refused, store dead, or late: compute it again (pull), or the
                 // block is not in the tier (push)
  kSkipped = 2,  // no plane of it was asked for
};

// One block of a pull: where its slots are. Addresses are 64-byte aligned, one for each layer of the
// request's range, each Geometry::SlotBytes() long.
struct PullBlock {
  TicketRef ticket;
  const PlacedBlock* block = nullptr;
  std::byte* const* base = nullptr;      // null: plane not wanted
  std::byte* const* residual = nullptr;  // null: plane not wanted
};

struct PushBlock {
  TicketRef ticket;
  const PlacedBlock* block = nullptr;
  const std::byte* const* base = nullptr;      // null: plane not sent
  const std::byte* const* residual = nullptr;  // null: plane not sent
};

struct TransferResult {
  int blocks_ok = 0;
  int blocks_lost = 0;
  // Of what was lost: block planes whose pins or reservations had ended with their session (a lease
  // that ran out, a store that restarted), by the store's word or by this worker's own clock.
  uint64_t pieces_expired = 0;
  uint64_t bytes = 0;   // that arrived
  int blocks_from_disk = 0;      // of blocks_ok: a plane had to be read from the store's disk first
  uint64_t bytes_from_disk = 0;  // of bytes
  uint32_t bursts = 0;  // messages of the transport's contract: one per store unless split
};

// Runs exactly once, on a transport thread, on one of the call pool (what was read from disk and then
// lost), or on the calling thread before Pull or Push returns
// when nothing could be sent: it must only enqueue, and the caller holds no lock that it takes.
using TransferDone = std::function<void(const TransferResult&)>;

// Everything pointed to (blocks, places, address arrays, memory, outcomes) is borrowed until `done`.
struct TierPull {
  absl::Span<const PullBlock> blocks;
  int layer_begin = 0;
  int layer_end = 0;  // exclusive
  absl::Span<TransferOutcome> outcomes;  // one per block, written before `done`
  absl::Time deadline = absl::InfiniteFuture();  // RealClock; at most what transfer_timeout gives
  TransferDone done;
};

struct TierPush {
  absl::Span<const PushBlock> blocks;
  int layer_begin = 0;
  int layer_end = 0;
  absl::Span<TransferOutcome> outcomes;
  absl::Time deadline = absl::InfiniteFuture();
  TransferDone done;
};

// A transfer in progress; zero is none.
using TransferId = StrongId<struct TransferTag>;

enum class SealOutcome : uint8_t {
  kSealed = 0,
  kIncomplete = 1,  // slices are missing
  kLost = 2,        // reservation or store gone
};

// How fast pulls from one store came lately, bytes per second; zero: not known.
struct PullRates {
  double memory = 0;
  double disk = 0;  // with the reading from disk
};

// One store as this client sees it.
struct StoreLinkFigures {
  NodeName name;
  std::string state;      // "up", "connecting", "down"
  std::string transport;  // "ucx", "shm", "loopback"; empty when down
  uint64_t sessions_opened = 0;
  uint64_t failures = 0;        // of control calls and connects
  uint64_t breaker_opened = 0;
  uint64_t lookups = 0;         // calls
  uint64_t lookup_blocks = 0;
  uint64_t hit_blocks = 0;      // of those, with at least the BASE plane
  uint64_t reserved_blocks = 0;
  uint64_t refused = 0;         // reservations
  uint64_t pulled_bytes = 0;
  uint64_t pushed_bytes = 0;
  uint64_t pull_bursts = 0;
  uint64_t push_bursts = 0;
  uint64_t lost_pieces = 0;
  uint64_t corrupt_pieces = 0;  // checksum differed
  uint64_t expired_pieces = 0;  // their session had ended
  uint64_t disk_bytes = 0;      // of pulled_bytes: read from the store's disk first
  uint64_t promote_calls = 0;
  uint64_t live_tickets = 0;
};

}  // namespace kvt
