// The index of a store node: which blocks exist, who holds them, what may be evicted (DESIGN 3).
// Owned by the node and used under its lock; pure: no threads, no clock (time is an argument, and
// NoteTime / every call with `now` first ends leases that are over), no bytes.
//
// 1. A block is visible (found by Lookup) only when it is sealed: all slices of both planes arrived
//    and no push to it is running. A sealed block's bytes never change.
// 2. Reservations are private. The first of equal keys to seal wins; a later one's records are
//    freed when it is complete, or when its writer asks, and its ticket gets a pin on the winner.
// 3. Lookup compares token ids, parent, provenance, domain, model and, for private blocks, the
//    ticket: a mismatch is a miss, and counted.
// 4. A block that is pinned or in flight is never evicted, no record is reused while it is in
//    flight. A pinned plane may leave memory once it is on disk; it is never lost for lack of room.
// 5. Reserve is all or nothing and evicts nothing when it refuses.
// 6. A ticket's pins and unsealed reservations in a session go when it is released there, when a
//    renewal does not list it, when a higher epoch of it is seen, when the session ends. Its room
//    and tails go when no session holds it any more; its approximate blocks are anyone's then.
// 7. What is on disk under a key belongs to the block that lookups find under it; when that block
//    is found no more, it is erased. So disk and index never join planes of two contents.
//
// The second medium (block_index_spill.cc). The index decides, the owner's spill threads move bytes
// outside its lock, in jobs:
//   spill:    TakeSpills -> write the bytes, which stay constant and in place -> EndSpill
//   promote:  BeginPromote -> read into the landing -> EndPromote
//   erase:    TakeErasures -> erase
// One thread at a time writes and erases: erasures first, then spills, each ended before it takes
// again. Promotions may run beside it. Only what two tickets used is worth a write, unless
// spill_one_time. Pinned planes are spilled only when a reservation or promotion found no room.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kvstore/index/aged_turn.h"
#include "kvstore/index/arrivals.h"
#include "kvstore/index/block_table.h"
#include "kvstore/index/disk_moves.h"
#include "kvstore/index/eviction_order.h"
#include "kvstore/index/eviction_plan.h"
#include "kvstore/index/index_types.h"
#include "kvstore/index/name_interner.h"
#include "kvstore/index/record_allocator.h"
#include "kvstore/index/session_table.h"
#include "kvstore/index/ticket_table.h"

namespace kvt {

class BlockIndex {
 public:
  using TenantUse = std::pair<std::string, BlockTable::DomainBytes>;
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
  // ticket (aged_turn.h) comes first. One whose turn it is gets OK, `aged->pending` and a part.
  absl::Status Reserve(absl::Time now, SessionId session, const TicketClaim& claim,
                       absl::Span<const BlockName> blocks, uint32_t output_blocks,
                       std::vector<ReservedBlock>* out, AgedAsk* aged = nullptr);
  // NotFound: no such session.
  absl::Status Seal(absl::Time now, SessionId session, LiveTicket ticket,
                    absl::Span<const uint64_t> handles, std::vector<SealedBlock>* out);
  // Idempotent; an epoch that is not the held one's lets nothing go.
  absl::Status Release(absl::Time now, SessionId session, LiveTicket ticket);

  void Prefetch(uint64_t record_handle) const { table_.Prefetch(BlockOfRecord(record_handle)); }
  // A transfer that reads: takes an in-flight count when kOk, and says where the range lies.
  // kRefused: no pin of that ticket and epoch in the session. kExpired: the session has ended. kLost:
  // gone, or not sealed.
  Access BeginRead(SessionId session, const RecordRange& range, uint64_t* arena_offset,
                   ReadCursor* cursor = nullptr);
  // Exactly once for each kOk.
  void EndRead(uint64_t record_handle);
  // A transfer that writes into an unsealed reservation of that ticket and epoch in the session.
  // Ranges are whole slices. kLost: gone or sealed meanwhile.
  Access BeginWrite(SessionId session, const RecordRange& range, uint64_t* arena_offset);
  // Exactly once for each kOk. `arrived`: the bytes are there and verified; otherwise they are
  // undefined. Seals the block when it is complete. False when the block went meanwhile.
  bool EndWrite(const RecordRange& range, bool arrived);

  // Its bytes are corrupt: nobody finds it any more, it goes with its last pin. Unknown: nothing.
  void Condemn(uint64_t block_handle);

  // Drops the RESIDUAL plane alone of an unheld block, from both media; false when there is none.
  bool TryDropResidual(uint64_t block_handle);
  // Everything of that tenant is found no more, is erased from disk, and leaves memory now, or when
  // its last pin goes; what its running writers seal later, too. Returns the blocks it met.
  uint64_t PurgeTenant(absl::string_view tenant);
  // Bytes of the tenant's records by medium.
  [[nodiscard]] BlockTable::DomainBytes BytesOfTenant(absl::string_view tenant) const;
  // With bytes in either medium, those with most first, at most so many.
  [[nodiscard]] std::vector<TenantUse> TopTenants(size_t tenants_max) const;

  // Whether the disk takes writes now; initially as has_disk.
  void SetDiskWritable(bool writable) { disk_.writable = writable && options_.has_disk; }
  // The disk has less room than options say: the oldest records go for the newest. 0: it has.
  void SetDiskLimit(uint64_t bytes) { disk_.limit_bytes = bytes; }
  // Frees what may leave at once and takes what is to be written, at most so many bytes (one record
  // at least). Each job's EndSpill is due.
  void TakeSpills(absl::Time now, uint64_t bytes_max, std::vector<SpillJob>* out);
  [[nodiscard]] bool WantsSpill() const {
    return disk_.writable && (disk_.pressed || IsPressed() || disk_.starved.records > 0);
  }
  void EndSpill(absl::Time now, uint64_t record_handle, bool written);
  PromoteBegin BeginPromote(absl::Time now, SessionId session, LiveTicket ticket,
                            uint64_t record_handle, PromoteJob* job);
  // `loaded`: the record's bytes lie verified in the landing. Otherwise the record is lost.
  void EndPromote(absl::Time now, uint64_t record_handle, bool loaded);
  // Oldest first.
  void TakeErasures(size_t erasures_max, std::vector<DiskErasure>* out);
  // At start: a block whose BASE is on disk; then its RESIDUAL, when incarnations agree. Its handle.
  // What is refused (duplicate, no number left, another incarnation) is to be erased.
  absl::StatusOr<uint64_t> RestoreBlock(const RestoredBlock& block);
  absl::StatusOr<uint64_t> RestoreResidual(const BlockKey& key, uint64_t incarnation);

  // Of a handle of either kind; null when it is gone. Valid until the next call.
  [[nodiscard]] const Block* FindBlock(uint64_t block_handle) {
    return table_.Find(BlockNumberOf(block_handle), GenerationOfHandle(block_handle));
  }
  // Of the block's model and tenant. Precondition: the block is named.
  [[nodiscard]] const Geometry& GeometryOf(const Block& block) const {
    return spaces_info_[block.space].geometry;
  }
  [[nodiscard]] const SpaceInfo& SpaceInfoOf(const Block& block) const {
    return spaces_info_[block.space];
  }
  [[nodiscard]] const std::string& TenantOf(const Block& block) const {
    return domains_.names()[block.domain];
  }
  [[nodiscard]] IndexStats Stats() const;
  // Crashes on a broken invariant. For tests; slow.
  void CheckInvariants();

 private:
  absl::StatusOr<Session*> NeedSession(absl::Time now, SessionId id);
  absl::StatusOr<uint32_t> SpaceOf(absl::string_view model_fingerprint,
                                   absl::string_view numerics_id, const Geometry& geometry);
  absl::StatusOr<RecordAllocator::ClassId> ClassOf(const Geometry& geometry);
  // The ticket's holder in the session, made when new; fences lower epochs.
  absl::StatusOr<Holder*> Hold(Session& session, const TicketClaim& claim);
  absl::Status CheckNames(absl::Span<const BlockName> blocks, const TicketClaim& claim,
                          uint32_t output_blocks = 0) const;
  [[nodiscard]] bool Matches(const Block& block, const BlockName& name, const Holder& holder,
                             const TicketEntry& ticket) const;
  // The sealed block of that name, or kNoBlock; counts a mismatch.
  uint32_t FindSealed(const BlockName& name, const Holder& holder, const TicketEntry& ticket);

  // Of a transfer whose ticket holds nothing in the session.
  [[nodiscard]] Access WhyNotHeld(SessionId session);
  bool Pin(Holder& holder, uint32_t number);
  void Unpin(Holder& holder, uint32_t number);
  // After a pin or count went: placed in the order, or freed when nobody finds it any more.
  void Settle(uint32_t number);
  // Nobody finds it any more; what of it is on disk is erased.
  void Unindex(uint32_t number);
  // To be erased from disk. A BASE that was there alone takes its block along.
  void LeaveDisk(uint32_t number, Plane plane);
  // Nobody finds it any more; frees it now or when its last transfer ends.
  void Discard(uint32_t number);
  void Evict(uint32_t number);
  [[nodiscard]] EvictionRules Rules(absl::Time now) const;
  bool TryMakeRoom(absl::Time now, const RoomNeed& need, AgedAsk* ask = nullptr);
  // Gives up the record's memory, and the record when it is not on disk.
  void GiveUp(uint64_t record_handle);
  [[nodiscard]] absl::Status NoRoom(uint64_t blocks, bool barred) const;
  [[nodiscard]] absl::Status NoTenantRoom(uint32_t domain, uint64_t blocks) const;
  // Records of the domain's own cold blocks to give up so that `bytes` more of that class fit its
  // quota; false when they do not.
  bool PlanTenantRoom(uint32_t domain, RecordAllocator::ClassId cls, uint64_t bytes,
                      std::vector<uint64_t>* records) const;

  [[nodiscard]] bool IsPressed() const {
    return static_cast<double>(allocator_.taken_bytes()) >
           options_.high_watermark * static_cast<double>(allocator_.capacity_bytes());
  }
  // Of TakeSpills: see block_index_spill.cc.
  struct SpillBatch;
  void SpillCold(SpillBatch& batch);
  void SpillColdOf(SpillBatch& batch, bool digests, absl::FunctionRef<uint64_t()> excess);
  void SpillPinned(SpillBatch& batch);
  bool AddSpill(SpillBatch& batch, uint32_t number, Plane plane, bool leave);
  bool TryMakeDiskRoom(uint32_t domain, uint64_t bytes);
  // Takes the oldest KV of the domain (of any) off the disk, with `digests` rather one of them.
  bool TryShedDisk(std::optional<uint32_t> domain, bool digests);
  void CheckBlock(uint32_t number) const;
  void AddRoom(TicketEntry& ticket, uint64_t blocks);
  uint32_t TakeBlock(TicketEntry& ticket, const Holder& holder);  // out of the room, if it has one
  void TrimRoom(TicketEntry& ticket, uint64_t blocks);
  // Keeps as much of `want` as there is. False: not the ticket's turn, or it would never fit.
  bool TryKeepPart(absl::Time now, TicketId id, TicketEntry& ticket, uint64_t want, AgedAsk* aged);

  void NameBlock(uint32_t number, const BlockName& name, const Holder& holder);
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
  std::vector<SpaceInfo> spaces_info_;  // by space
  NameInterner domains_;
  absl::flat_hash_map<BlockKey, uint32_t> sealed_;  // key -> block number
  std::vector<NodeName> lapsed_;
  absl::Time floors_again_ = absl::InfinitePast();  // see EvictionRules::floors
  DiskMoves disk_;
  IndexStats counters_;  // the running figures of it: pins, in flight, room, since boot
};

}  // namespace kvt
