// What the RocksDB spill store knows: which entries name which records, what lives in which
// segment, and how much room there is. Every change of entries goes through Commit, one at a time,
// so that the figures equal the entries. Owned by the store; thread-safe.
//
// Room: Reserve -> (segments are written) -> Commit -> Unreserve. Rewriting moves live records of
// victims into new segments and drops the victims; one rewriting at a time, on the thread of the
// call that needs it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/base/mutex.h"
#include "kvstore/media/rocksdb_spill_db.h"
#include "kvstore/media/rocksdb_spill_format.h"
#include "kvstore/media/rocksdb_spill_segments.h"
#include "kvstore/media/rocksdb_spill_store.h"

namespace kvt {

// An upper bound of what a record takes on disk, its entry in the log and a table included.
constexpr uint64_t SpillDiskBytesMax(uint64_t record_bytes, uint64_t meta_bytes) {
  return record_bytes + 2 * meta_bytes + 256;
}

struct SpillChange {
  SpillKey key;
  std::string entry;     // encoded; empty: erase
  uint64_t only_if = 0;  // not 0: only while the key's entry has this sequence
};

class SpillCore {
 public:
  struct Found {
    uint64_t sequence = 0;
    uint64_t bytes = 0;
    uint64_t checksum = 0;
  };
  struct NewSegment {
    uint64_t first = 0;
    uint64_t last = 0;
    uint64_t disk_bytes = 0;
    std::string path;
  };

  SpillCore(const RocksDbSpillOptions& options, RocksDbSpillDb& db);

  // Once, before all others: figures from what is on disk; drops halves.
  absl::Status Recover();

  // ResourceExhausted: no room even after rewriting.
  absl::Status Reserve(uint64_t bytes);
  void Unreserve(uint64_t bytes);
  // `count` sequences that nobody else gets; the first.
  uint64_t TakeSequences(uint64_t count);
  // Takes the segments in, then makes the changes; each is durable when it returns OK. On an error
  // the segments are garbage.
  absl::Status Commit(absl::Span<const NewSegment> segments, absl::Span<const SpillChange> changes);
  absl::Status EraseIf(const SpillKey& key, uint64_t sequence);

  // NotFound, DataLoss (damaged entry), Unavailable.
  std::vector<absl::StatusOr<Found>> Lookup(absl::Span<const SpillKey> keys) const;
  absl::StatusOr<Found> Lookup(const SpillKey& key) const { return Lookup({&key, 1})[0]; }
  absl::Status Scan(const SpillVisitor& visit);

  // Rewrites while there is more garbage, or more segments, than should be. Errors are logged: the
  // garbage stays for the next time.
  void Tidy();
  // Rewrites every segment with garbage, and the entries.
  absl::Status Reclaim();

  [[nodiscard]] uint64_t segment_bytes() const { return segment_bytes_; }
  [[nodiscard]] SpillUsage Usage() const;
  void SetFailure(absl::Status failure);

 private:
  // Holds one of the flags below; others wait.
  class Turn {
   public:
    Turn(SpillCore& core, bool& flag);
    ~Turn();

   private:
    SpillCore& core_;
    bool& flag_;
  };
  struct Figures {
    SpillSegments segments;
    uint64_t records = 0;
    uint64_t entry_bytes = 0;  // of live entries with their keys
    // A key's entry is replaced; empty: none.
    void Replace(const SpillKey& key, absl::string_view old_entry, absl::string_view new_entry);
  };
  struct Live {  // a record to be moved
    SpillKey key;
    uint64_t sequence = 0;
  };

  absl::Status CommitEntries(absl::Span<const SpillChange> changes,
                             absl::Span<const NewSegment> segments);
  // Makes the figures anew from what is on disk and drops halves: at open, and after the database
  // was opened again under us, when what failed calls wrote may be there. Nobody commits meanwhile.
  absl::Status Recount();
  bool Fits(uint64_t bytes, uint64_t entry_bytes, uint64_t free_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Live bytes that may be rewritten now without leaving quota or disk.
  uint64_t RewriteMax(uint64_t entry_bytes, uint64_t free_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status DropDead();
  std::vector<SpillSegment> TidyVictims() const;
  absl::Status Rewrite(absl::Span<const SpillSegment> victims);
  absl::StatusOr<std::vector<Live>> LiveOf(const SpillSegment& segment) const;
  absl::Status MoveSome(absl::Span<const Live> live, size_t* taken);

  const RocksDbSpillOptions options_;
  RocksDbSpillDb& db_;
  const uint64_t segment_bytes_;
  mutable Mutex mu_;
  CondVar changed_;
  bool committing_ ABSL_GUARDED_BY(mu_) = false;
  bool rewriting_ ABSL_GUARDED_BY(mu_) = false;
  bool dropping_ ABSL_GUARDED_BY(mu_) = false;
  Figures figures_ ABSL_GUARDED_BY(mu_);
  uint64_t counted_generation_ ABSL_GUARDED_BY(mu_) = 0;  // of the database
  uint64_t reserved_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_sequence_ ABSL_GUARDED_BY(mu_) = 1;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvt
