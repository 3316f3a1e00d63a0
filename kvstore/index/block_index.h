// The index of a store node: which blocks exist, who holds them, what may be evicted (DESIGN 3).
// Owned by the node and used under its lock; pure: no threads, no clock (time is an argument, and
// NoteTime / every call with `now` first ends leases that are over), no bytes.
//
// 1. A block is visible (found by Lookup) only when it is sealed: all slices of both planes arrived
//    and no push to it is running. A sealed block's bytes never change.
// 2. Reservations are private. The first of equal keys to seal wins; a later one's records are
// freed
//    when it is complete, or when its writer asks, and its ticket gets a pin on the winner.
// 3. Lookup compares token ids, parent, provenance, domain, model and, for private blocks, the
//    ticket: a mismatch is a miss, and counted.
// 4. A block that is pinned or in flight is never evicted and its records are never reused.
// 5. Reserve is all or nothing and evicts nothing when it refuses.
// 6. A ticket's pins and unsealed reservations in a session go when it is released there, when a
//    renewal does not list it, when a higher epoch of it is seen, when the session ends. Its room
//    and private blocks go when no session holds it any more.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kvstore/index/aged_turn.h"
#include "kvstore/index/arrivals.h"
#include "kvstore/index/block_table.h"
#include "kvstore/index/eviction_order.h"
#include "kvstore/index/name_interner.h"
#include "kvstore/index/record_allocator.h"
#include "kvstore/index/session_table.h"
#include "kvstore/index/ticket_table.h"

namespace kvt {

struct IndexOptions {
  uint64_t arena_bytes = 0;
  uint64_t slab_bytes = 0;  // divides arena_bytes
  uint32_t blocks_max = 0;
  absl::Duration lease = absl::Seconds(10);
  absl::Duration stall_after = absl::Seconds(1);  // several ticks of the owner
};

struct SessionSpec {
  SessionId id;
  std::string secret;
  NodeName worker;
  BootEpoch worker_epoch;
  Geometry geometry;
  std::string model_fingerprint;
  std::string numerics_id;
};

// What of a checked ticket the index needs.
struct TicketClaim {
  TicketId id;
  TicketEpoch epoch;
  absl::string_view tenant;
  Provenance provenance_max = Provenance::kExact;  // what the ticket's fidelity may read
};

// (ticket, epoch), as renewals list them.
struct LiveTicket {
  TicketId id;
  TicketEpoch epoch;
};

struct FoundBlock {
  BlockPresence presence = BlockPresence::kAbsent;
  uint64_t handle = 0;
  std::array<uint64_t, kPlanes> offset{kNoOffset, kNoOffset};
};

struct ReservedBlock {
  bool already_sealed = false;  // pinned, nothing to write
  uint64_t handle = 0;
  std::array<uint64_t, kPlanes> offset{kNoOffset, kNoOffset};
};

enum class IndexSealOutcome : uint8_t { kSealed, kIncomplete, kWinnerElsewhere, kLost };
struct SealedBlock {
  IndexSealOutcome outcome = IndexSealOutcome::kLost;
  uint64_t handle = 0;  // the winner's, pinned, for kWinnerElsewhere; else as asked
};

// Why a transfer may or may not touch a range.
// kOnDisk: the record exists, but not in memory. kExpired: the session has ended.
enum class Access : uint8_t { kOk, kLost, kRefused, kInvalid, kOnDisk, kExpired };

// A byte range of one record, as the data plane names it.
struct RecordRange {
  TicketId ticket;
  TicketEpoch epoch;
  uint64_t record_handle = 0;
  uint32_t offset = 0;
  uint32_t length = 0;
};

struct IndexStats {
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;  // = resident + reserved + writing + evicting
  std::array<uint64_t, kPlanes> resident_bytes{};
  uint64_t reserved_bytes = 0;
  uint64_t writing_bytes = 0;
  uint64_t evicting_bytes = 0;
  uint64_t blocks = 0;  // sealed
  uint64_t pinned_blocks = 0;
  uint64_t pins = 0;
  uint64_t in_flight = 0;  // records
  uint64_t output_reserved_blocks = 0;
  uint64_t sessions = 0;
  uint64_t tickets = 0;
  // Since boot; lookup_blocks = hit_blocks + base_only_blocks + those absent.
  uint64_t lookups = 0;
  uint64_t lookup_blocks = 0;
  uint64_t hit_blocks = 0;
  uint64_t base_only_blocks = 0;
  uint64_t mismatched_blocks = 0;  // the key was there, its content was not what was asked for
  uint64_t evicted_blocks = 0;
  uint64_t refused = 0;  // reservations
  uint64_t lapsed_leases = 0;
};

class BlockIndex {
 public:
  // `events` outlives the index.
  BlockIndex(const IndexOptions& options, RecordEvents& events);

  // Ends an earlier session of the worker. InvalidArgument (geometry, names too long),
  // FailedPrecondition (fenced boot; a record does not fit), ResourceExhausted.
  absl::Status OpenSession(absl::Time now, SessionSpec spec);
  // What `live` does not list is let go; a listed higher epoch keeps what a lower one holds.
  // NotFound: no such session.
  absl::Status Renew(absl::Time now, SessionId session, absl::Span<const LiveTicket> live);
  absl::Status CloseSession(absl::Time now, SessionId session);
  // Ends what is over. Called every tick.
  void NoteTime(absl::Time now);
  // Workers whose leases ended unrenewed since the last call, for the log; the first few.
  std::vector<NodeName> TakeLapsed();
  // Null: no such session. Valid until the next call.
  [[nodiscard]] const Session* FindSession(SessionId session) { return sessions_.Find(session); }

  // Fills out[i] for blocks[i] and pins what it reports. NotFound (session), FailedPrecondition
  // (fenced epoch), InvalidArgument (a name is malformed), ResourceExhausted (too many tickets).
  absl::Status Lookup(absl::Time now, SessionId session, const TicketClaim& claim,
                      absl::Span<const BlockName> blocks, std::vector<FoundBlock>* out);
  // Errors as Lookup's; ResourceExhausted too when there is no room even after eviction, or an aged
  // ticket (aged_turn.h) comes first. One whose turn it is gets OK, `aged->pending` and keeps a part.
  absl::Status Reserve(absl::Time now, SessionId session, const TicketClaim& claim,
                       absl::Span<const BlockName> blocks, uint32_t output_blocks,
                       std::vector<ReservedBlock>* out, AgedAsk* aged = nullptr);
  // NotFound: no such session.
  absl::Status Seal(absl::Time now, SessionId session, LiveTicket ticket,
                    absl::Span<const uint64_t> handles, std::vector<SealedBlock>* out);
  // Idempotent; an epoch that is not the held one's lets nothing go.
  absl::Status Release(absl::Time now, SessionId session, LiveTicket ticket);

  // A transfer that reads: takes an in-flight count when kOk, and says where the range lies.
  // kRefused: no pin of that ticket and epoch in the session. kExpired: the session has ended. kLost:
  // gone, or not sealed.
  Access BeginRead(SessionId session, const RecordRange& range, uint64_t* arena_offset);
  // Exactly once for each kOk.
  void EndRead(uint64_t record_handle);
  // A transfer that writes into an unsealed reservation of that ticket and epoch in the session.
  // Ranges are whole slices. kLost: gone or sealed meanwhile.
  Access BeginWrite(SessionId session, const RecordRange& range, uint64_t* arena_offset);
  // Exactly once for each kOk. `arrived`: the bytes are there and verified; otherwise they are
  // undefined. Seals the block when it is complete. False when the block went meanwhile.
  bool EndWrite(const RecordRange& range, bool arrived);

  // The block's bytes are corrupt: nobody finds it any more, and it goes with its last pin. Unknown:
  // nothing.
  void Condemn(uint64_t block_handle);

  // Evicts the RESIDUAL plane alone of a block in the eviction order; false when it is not there.
  bool TryDropResidual(uint64_t block_handle);

  // Block of a handle of either kind; null when it is gone. Valid until the next call.
  [[nodiscard]] const Block* FindBlock(uint64_t block_handle) {
    return table_.Find(BlockNumberOf(block_handle), GenerationOfHandle(block_handle));
  }
  // Of the block's model. Precondition: the block is named.
  [[nodiscard]] const Geometry& GeometryOf(const Block& block) const {
    return geometries_[block.space];
  }
  [[nodiscard]] IndexStats Stats() const;
  // Walks everything and crashes on a broken invariant. For tests; slow.
  void CheckInvariants();

 private:
  absl::StatusOr<Session*> NeedSession(absl::Time now, SessionId id);
  // The ticket's holder in the session, made when new; fences lower epochs.
  absl::StatusOr<Holder*> Hold(Session& session, const TicketClaim& claim);
  absl::Status CheckNames(absl::Span<const BlockName> blocks, const TicketClaim& claim) const;
  [[nodiscard]] bool Matches(const Block& block, const BlockName& name, const Holder& holder,
                             const TicketEntry& ticket) const;
  // The sealed block of that name, or kNoBlock; counts a mismatch.
  uint32_t FindSealed(const BlockName& name, const Holder& holder, const TicketEntry& ticket);

  // Of a transfer whose ticket holds nothing in the session.
  [[nodiscard]] Access WhyNotHeld(SessionId session);
  // False when the holder has the pin already.
  bool Pin(Holder& holder, uint32_t number);
  void Unpin(Holder& holder, uint32_t number);
  void TakeFromOrder(uint32_t number);
  // After a pin or count went: into the eviction order, or freed when nobody finds it any more.
  void Settle(uint32_t number);
  void Unindex(uint32_t number);
  // Nobody finds it any more; frees it now or when its last transfer ends.
  void Discard(uint32_t number);
  void Evict(uint32_t number);
  bool TryMakeRoom(RecordAllocator::ClassId cls, uint64_t blocks);
  void AddRoom(TicketEntry& ticket, uint64_t blocks);
  void TrimRoom(TicketEntry& ticket, uint64_t blocks);
  // Keeps as much of `want` as there is. False: not the ticket's turn, or it would never fit.
  bool TryKeepPart(absl::Time now, TicketId id, TicketEntry& ticket, uint64_t want, AgedAsk* aged);

  void NameBlock(uint32_t number, const BlockName& name, const Holder& holder,
                 const TicketEntry& ticket);
  // The sealed block with the same content and both planes, or kNoBlock.
  [[nodiscard]] uint32_t FindWinner(const Block& block, const TicketEntry& ticket) const;
  // The block is complete and no write runs.
  void SealBlock(uint32_t number);
  // The reservation's content exists already: frees it, pins the winner.
  void YieldTo(Holder& holder, uint32_t number, uint32_t winner);

  // Empties and removes the holder; the ticket stays.
  void DropHolder(TicketEntry& ticket, Holder& holder);
  void DropTicketIfUnheld(TicketId id);
  void LetGo(SessionId session, TicketId ticket);
  void EndSession(SessionId id);

  const IndexOptions options_;
  RecordAllocator allocator_;
  BlockTable table_;
  EvictionOrder order_;
  Arrivals arrivals_;
  SessionTable sessions_;
  TicketTable tickets_;
  AgedTurn turn_;
  NameInterner spaces_;
  std::vector<Geometry> geometries_;  // by space
  NameInterner domains_;
  absl::flat_hash_map<BlockKey, uint32_t> sealed_;  // key -> block number
  std::vector<NodeName> lapsed_;
  IndexStats counters_;  // the running figures of it: pins, in flight, room, since boot
};

}  // namespace kvt
