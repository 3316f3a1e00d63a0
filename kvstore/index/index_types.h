// What a store's index (block_index.h) takes and gives. Values only.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/base/ids.h"
#include "kernels/layout/geometry.h"
#include "kvstore/index/block_handle.h"
#include "kvstore/index/block_name.h"

namespace kvt {

struct IndexOptions {
  uint64_t arena_bytes = 0;
  uint64_t slab_bytes = 0;  // divides arena_bytes
  uint32_t blocks_max = 0;
  absl::Duration lease = absl::Seconds(10);
  absl::Duration stall_after = absl::Seconds(1);  // several ticks of the owner
  uint64_t boot = 0;  // differs between boots of a store; goes into incarnations
  // Of one sharing domain, in memory; 0: no bound. A reservation beyond it first evicts cold blocks
  // of the domain's own, then is refused.
  uint64_t tenant_bytes_max = 0;
  // The second medium; without one nothing below matters.
  bool has_disk = false;
  uint64_t disk_bytes_max = 0;  // of records on disk; 0: no bound
  uint64_t tenant_disk_bytes_max = 0;  // of one domain's, its own oldest go for its newest; 0: none
  bool spill_one_time = false;  // also what one ticket alone used
  // Of the arena: above the high one the background makes room until the low one. No effect without
  // a disk: dropping costs nothing, Reserve does it when it must.
  double high_watermark = 0.9;
  double low_watermark = 0.8;
  absl::Duration promoted_hold = absl::Seconds(5);
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

// A model, as sessions name it.
struct SpaceInfo {
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
  std::array<bool, kPlanes> on_disk{};  // alone
};

struct ReservedBlock {
  bool already_sealed = false;  // pinned, nothing to write
  uint64_t handle = 0;
  std::array<uint64_t, kPlanes> offset{kNoOffset, kNoOffset};
  std::array<bool, kPlanes> on_disk{};  // alone
};

// A record to be written to disk. Its bytes are constant and stay until EndSpill.
struct SpillJob {
  uint64_t record_handle = 0;
  BlockKey key;
  uint64_t offset = 0;  // in the arena
  uint32_t bytes = 0;
};
// A record to be read from disk into `offset` of the arena, which is the job's until EndPromote.
struct PromoteJob {
  uint64_t record_handle = 0;
  BlockKey key;
  uint64_t offset = 0;
  uint32_t bytes = 0;
};
// kResident: in memory. kStarted: the job is the caller's. kRunning: another's. kNoRoom: nothing
// can leave for it now. kLost: no such record for this ticket.
enum class PromoteBegin : uint8_t { kResident, kStarted, kRunning, kNoRoom, kLost };
// Something to be erased from disk.
struct DiskErasure {
  BlockKey key;
  Plane plane = Plane::kBase;
};
// A block as a scan of the disk finds it.
struct RestoredBlock {
  BlockName name;
  std::string tenant;
  std::string model_fingerprint;
  std::string numerics_id;
  Geometry geometry;
  uint64_t incarnation = 0;
};

enum class IndexSealOutcome : uint8_t { kSealed, kIncomplete, kWinnerElsewhere, kLost };
struct SealedBlock {
  IndexSealOutcome outcome = IndexSealOutcome::kLost;
  uint64_t handle = 0;  // the winner's, pinned, for kWinnerElsewhere; else as asked
};

// Why a transfer may or may not touch a range.
// kOnDisk: the record exists, but not in memory. kExpired: the session has ended.
enum class Access : uint8_t { kOk, kLost, kRefused, kInvalid, kOnDisk, kExpired };

struct Holder;

// Spares the pieces of one burst the search for their ticket's holder. Valid under one hold of the
// index owner's lock, for one session.
struct ReadCursor {
  TicketId ticket;
  TicketEpoch epoch;
  const Holder* holder = nullptr;
};

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
  uint64_t used_bytes = 0;  // = resident + reserved + writing + evicting + promoting
  std::array<uint64_t, kPlanes> resident_bytes{};
  uint64_t reserved_bytes = 0;
  uint64_t writing_bytes = 0;
  uint64_t evicting_bytes = 0;
  uint64_t promoting_bytes = 0;
  uint64_t spilling_bytes = 0;  // among the others
  std::array<uint64_t, kPlanes> disk_bytes{};
  std::array<uint64_t, kPlanes> disk_records{};
  uint64_t index_bytes = 0;  // heap, about
  uint64_t blocks = 0;       // sealed
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
  std::array<uint64_t, kPlanes> spilled{};   // records written to disk
  std::array<uint64_t, kPlanes> promoted{};  // records read back
  std::array<uint64_t, kPlanes> dropped{};   // records lost for lack of room
  uint64_t lost_on_disk = 0;                 // records that could not be read back
  uint64_t tenant_refused = 0;               // reservations beyond a tenant's quota
};

}  // namespace kvt
