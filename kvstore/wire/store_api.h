// Control of a store node: sessions, lookup, reservation, release, figures. Bytes travel on the
// data plane (kvstore/transport). One interface; implemented by the node (kvstore/node) and by the
// gRPC client stub (store_rpc.h), which also serves an implementation. All calls are thread-safe; a
// stub's call ends by its deadline with a typed status.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/base/ids.h"
#include "kernels/base/limits.h"
#include "kernels/layout/geometry.h"
#include "kvstore/index/block_handle.h"
#include "kvstore/index/block_name.h"
#include "kvstore/wire/ticket.h"
#include "kvstore/wire/version.h"

namespace kvt {

struct OpenSessionRequest {
  NodeName worker;
  BootEpoch worker_epoch;
  WireVersionRange versions;
  Geometry geometry;
  std::string model_fingerprint;
  std::string numerics_id;
};

inline constexpr size_t kSessionSecretBytes = 16;

struct OpenSessionReply {
  SessionId session;
  std::string secret;  // kSessionSecretBytes: presented when attaching a data channel
  uint32_t wire_version = 0;
  absl::Duration lease;
  BootEpoch store_epoch;
  std::string host_id;       // equal ids share a host (kernel boot id): shared memory is possible
  std::string ucx_address;   // "host:port"; empty when the store serves none
  std::string shm_socket;    // Unix socket path; empty when the store serves none
  std::string ucx_settings;  // compared at attach
};

// Where a pinned or reserved block lies at the store.
struct BlockPlace {
  // The data plane takes PlaneRecordHandle(handle, plane) (kvstore/index/block_handle.h).
  uint64_t handle = 0;
  // In the arena mapping, for same-host readers. kNoOffset: the plane is absent or on disk.
  uint64_t base_offset = 0;
  uint64_t residual_offset = 0;
  // The plane is on disk alone: a pull of it answers kOnDisk until Promote has brought it back.
  bool base_on_disk = false;
  bool residual_on_disk = false;
  // Per plane, per slice (layer * kv_heads + head); empty in replies to Reserve.
  std::vector<uint64_t> base_checksums;
  std::vector<uint64_t> residual_checksums;
};

struct LookupRequest {
  SessionId session;
  SignedTicket ticket;
  std::vector<BlockName> blocks;
};
// Found blocks are pinned under the ticket, atomically with the answer.
struct LookupReply {
  struct Block {
    BlockPresence presence = BlockPresence::kAbsent;
    BlockPlace place;
  };
  std::vector<Block> blocks;  // as asked
};

struct ReserveRequest {
  SessionId session;
  SignedTicket ticket;
  std::vector<BlockName> blocks;
  // Room kept for what decoding will write, not yet named: after the call the ticket, over all its
  // sessions, holds at least so much here. Blocks that are named later use it up first.
  uint32_t output_blocks = 0;
  // Greater than zero: an aged ticket, that has been refused for so long. One of them at a time keeps
  // what there is (`pending`) until all is there; nobody else is admitted meanwhile. It asks again
  // within kAgedTurnLapse (kvstore/index/aged_turn.h).
  absl::Duration waited = absl::ZeroDuration();
};
// All or nothing; ResourceExhausted (retryable) when there is no room after eviction.
struct ReserveReply {
  bool pending = false;  // nothing is granted yet; `blocks` is empty
  struct Block {
    bool already_sealed = false;  // another writer was first: `place` is pinned, nothing to push
    BlockPlace place;
  };
  std::vector<Block> blocks;
};

struct SealRequest {
  SessionId session;
  TicketRef ticket;
  std::vector<uint64_t> handles;
};
// A block seals by itself when its last slice arrives; this asks how it ended.
struct SealReply {
  enum class Outcome : uint8_t { kSealed = 0, kIncomplete = 1, kWinnerElsewhere = 2, kLost = 3 };
  struct Block {
    Outcome outcome = Outcome::kLost;
    uint64_t handle = 0;  // the winner's, pinned, for kWinnerElsewhere
  };
  std::vector<Block> blocks;
};

// A reader found bytes of these records (PlaneRecordHandle) that differ from their checksums.
struct VerifyRequest {
  SessionId session;
  TicketRef ticket;  // that has them pinned
  std::vector<uint64_t> records;
};

// Bring records (PlaneRecordHandle) that the ticket has pinned in the session back into memory.
struct PromoteRequest {
  SessionId session;
  TicketRef ticket;
  std::vector<uint64_t> records;
  // How long the answer may wait for the disk; at most kPromoteWaitMax counts. Keep it below the
  // stub's own timeout.
  absl::Duration wait = absl::Seconds(2);
};
inline constexpr absl::Duration kPromoteWaitMax = absl::Seconds(10);
struct PromoteReply {
  // kResident: in memory now, pinned as before; it may be spilled again later.
  // kNoRoom: memory has no place for it now; ask again, or compute it.
  // kLost: gone, corrupt, unreadable, or not pinned by the ticket: a miss.
  // kLate: still being read when `wait` was over; ask again.
  enum class Outcome : uint8_t { kResident = 0, kNoRoom = 1, kLost = 2, kLate = 3 };
  std::vector<Outcome> outcomes;  // as asked
  uint64_t bytes_from_disk = 0;   // read for this call
};

// Everything of a sharing domain is to go: found no more at once, out of memory when its last pin
// goes, off the disk.
struct PurgeTenantRequest {
  std::string tenant;  // "" is the shared domain
  // How long the answer may wait for the disk; at most kPurgeWaitMax counts.
  absl::Duration wait = absl::Seconds(5);
};
inline constexpr absl::Duration kPurgeWaitMax = absl::Minutes(5);
struct PurgeTenantReply {
  uint64_t blocks = 0;        // met, in any state
  uint64_t memory_bytes = 0;  // still there: pinned, or under a transfer
  bool disk_reclaimed = true;  // false: erased in the index, on the medium not before the wait ended
};

struct ReleaseRequest {
  SessionId session;
  TicketRef ticket;
};

struct RenewRequest {
  SessionId session;
  // What is not listed is let go: list a ticket before its first Lookup or Reserve is sent.
  std::vector<TicketRef> live;
};
struct RenewReply {
  absl::Duration lease;  // from when the caller asked
};

// What `kvtide tier` shows; from the allocator and the index, never estimated.
// What one tenant's blocks take.
struct TenantBytes {
  std::string tenant;
  uint64_t memory_bytes = 0;
  uint64_t disk_bytes = 0;
};

struct StoreStats {
  NodeName name;
  BootEpoch epoch;
  uint64_t capacity_bytes = 0;
  uint64_t used_bytes = 0;                         // records handed out, any state
  std::array<uint64_t, kPlanes> resident_bytes{};  // sealed, by plane
  uint64_t reserved_bytes = 0;
  uint64_t writing_bytes = 0;
  uint64_t evicting_bytes = 0;
  uint64_t blocks = 0;
  uint64_t pinned_blocks = 0;
  uint64_t pins = 0;       // (ticket, block) pairs
  uint64_t in_flight = 0;  // records under a running send
  uint64_t output_reserved_blocks = 0;
  uint64_t sessions = 0;
  uint64_t tickets = 0;
  uint64_t lookups = 0;
  uint64_t lookup_blocks = 0;
  uint64_t hit_blocks = 0;
  uint64_t base_only_blocks = 0;
  uint64_t evicted_blocks = 0;
  uint64_t refused = 0;
  uint64_t pulled_bytes = 0;
  uint64_t pushed_bytes = 0;
  uint64_t checksum_failures = 0;
  uint64_t mismatched_blocks = 0;  // looked up: the key was there, its content was not what was asked
  uint64_t lapsed_leases = 0;
  // The second medium, by plane; all zero without one. A plane may be in both media.
  std::array<uint64_t, kPlanes> disk_bytes{};    // of records that can be read back
  std::array<uint64_t, kPlanes> disk_records{};
  uint64_t disk_used_bytes = 0;   // what the medium holds for them and for erased ones
  uint64_t disk_quota_bytes = 0;  // of disk_used_bytes
  uint64_t spill_queue_bytes = 0;    // being written
  uint64_t promote_queue_bytes = 0;  // being read
  // Since boot, records by plane.
  std::array<uint64_t, kPlanes> spilled{};   // written to disk
  std::array<uint64_t, kPlanes> promoted{};  // read back into memory
  std::array<uint64_t, kPlanes> dropped{};   // given up by memory that are on no disk
  uint64_t spill_failures = 0;    // batches that could not be written
  uint64_t promote_failures = 0;  // records that could not be read back
  std::string disk_failing;       // why disk takes nothing now; empty: it works
  uint64_t index_bytes = 0;       // heap of the index, about
  uint64_t tenant_refused = 0;    // reservations beyond their tenant's quota
  uint64_t spill_waits = 0;       // reservations that waited for the writer to disk
  uint64_t promote_retries = 0;   // records read again after an error
  uint64_t disk_limit_bytes = 0;  // of records on a disk that is full before its quota; 0: none
  std::vector<TenantBytes> tenants;  // those with most bytes, in order
};

class StoreApi {
 public:
  virtual ~StoreApi() = default;
  virtual absl::StatusOr<OpenSessionReply> OpenSession(const OpenSessionRequest& request) = 0;
  virtual absl::StatusOr<RenewReply> Renew(const RenewRequest& request) = 0;
  // NotFound: no such session (a store that restarted, a lease that ended).
  virtual absl::StatusOr<LookupReply> Lookup(const LookupRequest& request) = 0;
  virtual absl::StatusOr<ReserveReply> Reserve(const ReserveRequest& request) = 0;
  virtual absl::StatusOr<SealReply> Seal(const SealRequest& request) = 0;
  // The store compares the records with their checksums itself; a block that is corrupt is found by
  // nobody any more, so that it can be written again, and goes with its last pin.
  virtual absl::Status Verify(const VerifyRequest& request) = 0;
  // Answers when each record is in memory, or cannot be, or the wait is over. NotFound: no session.
  virtual absl::StatusOr<PromoteReply> Promote(const PromoteRequest& request) = 0;
  virtual absl::StatusOr<PurgeTenantReply> PurgeTenant(const PurgeTenantRequest& request) = 0;
  // Drops the ticket's pins and unsealed reservations in this session. Idempotent.
  virtual absl::Status Release(const ReleaseRequest& request) = 0;
  virtual absl::Status CloseSession(SessionId session) = 0;
  virtual absl::StatusOr<StoreStats> Stats() = 0;
};

}  // namespace kvt
