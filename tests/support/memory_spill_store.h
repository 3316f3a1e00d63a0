// A SpillStore in memory with faults to order, for tests of who stands above it.
//
//   auto medium = std::make_shared<MemorySpillMedium>();
//   auto store = std::make_unique<MemorySpillStore>(medium);     // the process starts
//   medium->CrashAtStep(n, Unsynced::kTorn);                     // the power fails in it
//   ... medium->crashed() ...
//   store = std::make_unique<MemorySpillStore>(medium);          // it starts again on what is left
//
// The medium is the disk: it outlives the stores opened on it. Every call of a store goes through
// numbered steps, at each of which a crash can be ordered: one as each record is written (not
// durable yet), one at the sync (before it), one after the sync and before the call returns; one
// per record read, per key erased, one at a reclaim and one per record visited by a scan. So
//   for (n = 0;; ++n) { medium->CrashAtStep(n, how); Scenario(); if (!medium->crashed()) break; }
// crashes a scenario at every step there is. Space of erased records counts as disk bytes until
// Reclaim, or until a write needs it. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/base/mutex.h"
#include "kvstore/media/spill_store.h"

namespace kvt {

// What a crash leaves of a batch that was written and not synced yet.
enum class Unsynced {
  kLost,  // nothing
  kKept,  // every record that was written, whole
  kTorn,  // the same, but the last one torn
};

class MemorySpillMedium {
 public:
  explicit MemorySpillMedium(uint64_t quota_bytes = 0, uint64_t free_bytes = uint64_t{1} << 40)
      : quota_bytes_(quota_bytes), free_bytes_(free_bytes) {}

  // ---- faults. Counted from the call; a later order of the same kind replaces an earlier one ----

  // The n-th record to be written (0: the next) fails its batch with `status`; of the batch, the
  // records before it stay, whole.
  void FailWrite(uint64_t n, absl::Status status);
  // Every write, or read, fails with `status` until OK is set.
  void SetWriteFailure(absl::Status status);
  void SetReadFailure(absl::Status status);
  // The next n reads of records fail with `status`.
  void FailReads(uint64_t n, absl::Status status);
  void SetScanFailure(absl::Status status);
  // The n-th record to be written is acknowledged and lies torn on the medium.
  void TearWrite(uint64_t n);
  // Flips a byte of a record that is there; false: it is not.
  bool Damage(const SpillKey& key);
  // At the n-th step everything not durable is dropped; calls fail with Unavailable from then on,
  // until a store is opened anew.
  void CrashAtStep(uint64_t n, Unsynced unsynced);
  void CrashNow() { CrashAtStep(0, Unsynced::kLost); }
  // The file system's free space; a write that needs more is refused.
  void SetFreeBytes(uint64_t bytes);
  void SetQuota(uint64_t bytes);
  // Every call first waits for so long, or until the delay is set to zero.
  void SetDelay(absl::Duration delay);
  void ClearFaults();

  // ---- what is there ----

  [[nodiscard]] bool crashed() const;
  [[nodiscard]] uint64_t steps() const;   // since the medium was made
  [[nodiscard]] uint64_t writes() const;  // records acknowledged
  [[nodiscard]] uint64_t reads() const;   // records given
  [[nodiscard]] uint64_t reclaims() const;
  [[nodiscard]] int waiting() const;  // calls held by the delay
  [[nodiscard]] bool Holds(const SpillKey& key) const;
  // Whether the bytes are anywhere on the medium, those of erased records included.
  [[nodiscard]] bool ContainsBytes(absl::string_view pattern) const;

 private:
  friend class MemorySpillStore;
  using Name = std::pair<std::array<uint8_t, 16>, SpillPart>;
  struct Record {
    std::string meta;
    std::string bytes;
    uint64_t checksum = 0;
  };
  static constexpr uint64_t kNever = ~uint64_t{0};

  static Name NameOf(const SpillKey& key) { return {key.block, key.part}; }
  static uint64_t Sum(const Record& record);
  static bool Whole(const Record& record) { return Sum(record) == record.checksum; }
  static uint64_t Size(const Record& record);
  // Waits out the delay; an error when a crash or a newer store ended this one.
  absl::Status Enter(uint64_t boot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // One step; an error when the crash ordered for it happened.
  absl::Status Step() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Admit(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Drop(const Name& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Put(const Name& name, Record record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status WriteLocked(absl::Span<const SpillWrite> batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ReadLocked(const SpillRead& read) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t DiskBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return live_bytes_ + dead_bytes_;
  }

  mutable Mutex mu_;
  CondVar changed_;
  std::map<Name, Record> durable_ ABSL_GUARDED_BY(mu_);
  // Written in the current batch, in order.
  std::vector<std::pair<Name, Record>> unsynced_ ABSL_GUARDED_BY(mu_);
  std::string dead_ ABSL_GUARDED_BY(mu_);  // bytes of erased and replaced records
  uint64_t live_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t dead_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t quota_bytes_ ABSL_GUARDED_BY(mu_);
  uint64_t free_bytes_ ABSL_GUARDED_BY(mu_);

  uint64_t fail_write_ ABSL_GUARDED_BY(mu_) = kNever;
  absl::Status fail_write_status_ ABSL_GUARDED_BY(mu_);
  uint64_t tear_write_ ABSL_GUARDED_BY(mu_) = kNever;
  absl::Status write_failure_ ABSL_GUARDED_BY(mu_);
  absl::Status read_failure_ ABSL_GUARDED_BY(mu_);
  uint64_t fail_reads_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status fail_reads_status_ ABSL_GUARDED_BY(mu_);
  absl::Status scan_failure_ ABSL_GUARDED_BY(mu_);
  absl::Status last_failure_ ABSL_GUARDED_BY(mu_);
  uint64_t crash_step_ ABSL_GUARDED_BY(mu_) = kNever;
  Unsynced crash_unsynced_ ABSL_GUARDED_BY(mu_) = Unsynced::kLost;
  bool crashed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Duration delay_ ABSL_GUARDED_BY(mu_) = absl::ZeroDuration();

  uint64_t boot_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t steps_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t record_writes_ ABSL_GUARDED_BY(mu_) = 0;  // tried
  uint64_t writes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t reads_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t reclaims_ ABSL_GUARDED_BY(mu_) = 0;
  int waiting_ ABSL_GUARDED_BY(mu_) = 0;
};

// Opening one ends an earlier one of the same medium (its calls fail) and takes a crash back.
class MemorySpillStore final : public SpillStore {
 public:
  explicit MemorySpillStore(std::shared_ptr<MemorySpillMedium> medium);

  absl::Status Write(absl::Span<const SpillWrite> batch) override;
  void Read(absl::Span<const SpillRead> reads, absl::Span<absl::Status> statuses) override;
  absl::Status Erase(absl::Span<const SpillKey> keys) override;
  absl::Status Reclaim() override;
  absl::Status Scan(const SpillVisitor& visit) override;
  [[nodiscard]] SpillUsage Usage() const override;

 private:
  const std::shared_ptr<MemorySpillMedium> medium_;
  uint64_t boot_ = 0;
};

}  // namespace kvt
