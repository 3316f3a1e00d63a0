// A store node: StoreApi for workers' control calls and PieceResolver for the data plane, over one
// BlockIndex and one Arena, under one mutex that is held for the length of one call's index work.
//
// Owned by the composition root, which also owns the arena (outlives the node), the transport
// servers and the RPC server (stopped before the node goes), and calls Tick about every kStoreTick.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/index/block_index.h"
#include "kvstore/media/arena.h"
#include "kvstore/media/spill_store.h"
#include "kvstore/node/checksum_table.h"
#include "kvstore/node/spill_meta.h"
#include "kvstore/node/ticket_cache.h"
#include "kvstore/transport/transport_server.h"
#include "kvstore/wire/store_api.h"

namespace kvt {

inline constexpr absl::Duration kStoreTick = absl::Milliseconds(250);
// A gap between ticks beyond this means that the store itself stalled: leases are extended by it.
inline constexpr absl::Duration kStoreStallAfter = absl::Seconds(1);
// Data connections of one session.
inline constexpr int kSessionChannelsMax = 16;

struct StoreNodeConfig {
  NodeName name;
  BootEpoch epoch;
  std::string host_id;  // LocalHostId()
  absl::Duration lease = absl::Seconds(10);
  uint64_t slab_bytes = 0;      // divides the arena
  uint32_t blocks_max = 0;      // the arena's record table has twice as many entries
  WireVersionRange versions{};  // for tests
  // The second medium (AttachDisk); see IndexOptions.
  bool has_disk = false;
  uint64_t disk_bytes_max = 0;
  bool spill_one_time = false;
  double spill_high_watermark = 0.9;
  double spill_low_watermark = 0.8;
  absl::Duration promoted_hold = absl::Seconds(5);
  uint64_t tenant_bytes_max = 0;
  uint64_t tenant_disk_bytes_max = 0;
  // How long a reservation waits for reused blocks to reach the disk before they are dropped for it.
  // Aged ones do not wait.
  absl::Duration spill_wait;
};

// Bytes of one batch to disk, and so of what is being written at once; at most an eighth of the
// arena.
inline constexpr uint64_t kSpillBatchBytes = 32 * 1024 * 1024;
inline constexpr size_t kErasuresPerRound = 4096;
// Records of one batch from disk, and those that may wait for it.
inline constexpr size_t kPromoteBatchRecords = 64;
inline constexpr size_t kPromoteQueueMax = 16384;
// A record that cannot be read, or arrives corrupt, is read so often in all before it is given up.
inline constexpr int kPromoteReadsMax = 3;
// Tenants that Stats names.
inline constexpr size_t kTenantsShownMax = 16;
// A disk that others fill keeps at most what is there; it is looked whether that has changed.
inline constexpr absl::Duration kDiskLimitCheck = absl::Seconds(1);
// A disk that failed is tried again after the first, then ever later up to the second.
inline constexpr absl::Duration kSpillRetryMin = absl::Seconds(1);
inline constexpr absl::Duration kSpillRetryMax = absl::Seconds(60);

// Where workers reach the data plane; empty: not served.
struct DataPlaneAddresses {
  std::string ucx_address;
  std::string shm_socket;
};

class StoreNode final : public StoreApi, public PieceResolver {
 public:
  StoreNode(const StoreNodeConfig& config, Arena& arena, const Clock& clock);
  ~StoreNode() override = default;

  // The key that tickets are checked with. InvalidArgument: not a public key.
  absl::Status AddTicketKey(absl::string_view public_key) { return tickets_.AddKey(public_key); }
  // Before sessions are opened.
  void SetDataPlane(DataPlaneAddresses addresses);
  // While its memory is made ready its control calls are answered, sessions are refused with
  // Unavailable saying how far it is, and the coordinator is told. A new node is ready.
  void SetStarting(int percent) { starting_percent_.store(percent); }
  // After SetDataPlane.
  void SetReady() { starting_percent_.store(kReady); }
  // -1: ready.
  [[nodiscard]] int starting_percent() const { return starting_percent_.load(); }
  // The second medium, which outlives the node: takes back what is on it, then uses it. Before
  // sessions are opened; config.has_disk. Errors of the scan; the node is then as without a disk.
  absl::Status AttachDisk(SpillStore& disk);
  // One round of the disk's writer: erases, then writes a batch. For one thread of the composition
  // root, which loops: while it returns true there may be more to do at once.
  bool SpillRound();
  // One round of a reader: a batch from disk. For any number of threads.
  bool PromoteRound();
  // Wait for work of the rounds, at most so long.
  void WaitForSpill(absl::Duration timeout);
  void WaitForPromote(absl::Duration timeout);
  // Ends leases that are over, also the store's own after a stall.
  void Tick();
  // While draining, sessions, lookups and reservations are refused with Unavailable; what runs
  // ends.
  void SetDraining(bool draining) { draining_.store(draining); }
  // No record is under a running transfer.
  [[nodiscard]] bool IsQuiet();
  [[nodiscard]] StoreStats StatsNow();

  absl::StatusOr<OpenSessionReply> OpenSession(const OpenSessionRequest& request) override;
  absl::StatusOr<RenewReply> Renew(const RenewRequest& request) override;
  absl::StatusOr<LookupReply> Lookup(const LookupRequest& request) override;
  absl::StatusOr<ReserveReply> Reserve(const ReserveRequest& request) override;
  absl::StatusOr<SealReply> Seal(const SealRequest& request) override;
  absl::Status Verify(const VerifyRequest& request) override;
  absl::StatusOr<PromoteReply> Promote(const PromoteRequest& request) override;
  absl::StatusOr<PurgeTenantReply> PurgeTenant(const PurgeTenantRequest& request) override;
  absl::Status Release(const ReleaseRequest& request) override;
  absl::Status CloseSession(SessionId session) override;
  // With the tenants that hold most.
  absl::StatusOr<StoreStats> Stats() override;
  // What people should know of it, on one line; empty: nothing.
  [[nodiscard]] std::string Condition();

  absl::Status Attach(const SessionToken& token) override;
  void Detach(SessionId session) override;
  void ResolvePull(SessionId session, absl::Span<const Piece> pieces,
                   absl::Span<ResolvedPull> out) override;
  void ReleasePull(SessionId session, absl::Span<const Piece> pieces) override;
  void ResolvePush(SessionId session, absl::Span<const Piece> pieces,
                   absl::Span<ResolvedPush> out) override;
  void CommitPush(SessionId session, absl::Span<const PushedPiece> pieces,
                  absl::Span<PieceStatus> verdicts) override;

 private:
  static constexpr int kReady = -1;

  // Keeps the arena's record table in step with the index. Called by the index, under mu_.
  class Publisher final : public RecordEvents {
   public:
    explicit Publisher(RecordTable& table) : table_(table) {}
    void OnSealed(uint64_t record_handle, uint64_t offset) override {
      table_.Publish(record_handle, offset);
    }
    void OnMovedToDisk(uint64_t record_handle) override { table_.MoveToDisk(record_handle); }
    void OnWithdrawn(uint64_t record_handle) override {
      table_.Withdraw(RecordIndexOf(record_handle));
    }

   private:
    RecordTable& table_;
  };

  absl::Status CheckNotDraining() const;
  // Does the ticket belong to the model that the session was opened for?
  absl::Status CheckModel(SessionId session, const Ticket& ticket)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // store_node_spill.cc.
  struct SpillWork;
  void TakeSpillWork(SpillWork* work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteDisk(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The disk is full before the quota is: keeps less there, until there is room again.
  void LimitDisk() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReviewDiskLimit(const SpillUsage& usage) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::string MetaOf(uint64_t record_handle) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RestoreBase(const SpillMeta& meta, uint64_t bytes, std::vector<SpillKey>* unwanted);
  void RestoreResidual(const BlockKey& key, const SpillMeta& meta, std::vector<SpillKey>* unwanted);
  void FillDiskStats(const IndexStats& index, StoreStats* stats) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void CopyChecksums(uint64_t handle, BlockPlace* place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Fetch the blocks of a burst's pieces before their turn.
  void PrefetchFirst(absl::Span<const Piece> pieces) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PrefetchAhead(absl::Span<const Piece> pieces, size_t at) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Keeps what the writer says its slices sum to.
  void KeepChecksums(const PushedPiece& pushed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const StoreNodeConfig config_;
  Arena& arena_;
  const Clock& clock_;
  TicketCache tickets_;
  std::atomic<bool> draining_{false};
  std::atomic<int> starting_percent_{kReady};
  Publisher publisher_;

  Mutex mu_;
  BlockIndex index_ ABSL_GUARDED_BY(mu_);
  ChecksumTable checksums_ ABSL_GUARDED_BY(mu_);
  DataPlaneAddresses addresses_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SessionId, int> channels_ ABSL_GUARDED_BY(mu_);  // attached and not detached
  uint64_t pulled_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t pushed_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t checksum_failures_ ABSL_GUARDED_BY(mu_) = 0;

  SpillStore* disk_ = nullptr;  // set by AttachDisk, before others call
  CondVar spill_work_;
  CondVar spill_done_;
  CondVar promote_work_;
  CondVar promote_done_;
  CondVar purge_done_;
  std::deque<PromoteJob> promotes_ ABSL_GUARDED_BY(mu_);
  std::vector<SpillKey> erase_again_ ABSL_GUARDED_BY(mu_);  // before anything is written
  SpillUsage disk_usage_ ABSL_GUARDED_BY(mu_);  // after the writer's last round
  std::string disk_failing_ ABSL_GUARDED_BY(mu_);
  uint64_t disk_limit_ ABSL_GUARDED_BY(mu_) = 0;        // of records there; 0: none
  uint64_t disk_free_at_limit_ ABSL_GUARDED_BY(mu_) = 0;  // of the file system, when it was set
  absl::Time disk_limit_check_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Time disk_retry_at_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Duration disk_retry_ ABSL_GUARDED_BY(mu_) = kSpillRetryMin;
  uint64_t spill_failures_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t promote_retries_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t spill_waits_ ABSL_GUARDED_BY(mu_) = 0;  // reservations that waited for the writer
  uint64_t purges_wanted_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t purges_done_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvt
