// The SpillStore on a file system: RocksDB, used as a log of segments (docs/decisions/0005, bytes
// in docs/FORMATS.md).
//
//   folder/FORMAT    version of the whole folder; this one and the one before are opened
//   folder/db        RocksDB: `values`, sequence -> record; `default`, record key -> entry
//   (sequence,
//                    size, checksum, what the node says of it)
//   folder/staging   segments being written; emptied at open
//
// Write puts a batch's records into one or more segments (SST files of ascending sequence, written
// once, past the page cache), hands them to RocksDB and then commits their entries in one synced
// write. So a value goes to the disk once, without log or memtable, and is never compacted by
// RocksDB.
//
// 1. An entry is there only when its record is: segments are durable before entries name them, and
// are
//    dropped after no durable entry names them. What a crash leaves of half a batch is a segment
//    without entries, dropped at open.
// 2. Erased and replaced records are garbage in their segment. A segment without live ones is
// dropped at
//    once; others are rewritten when garbage is more than a third of what lives, when a write needs
//    their room, and by Reclaim.
// 3. All files together stay within the quota, of which an eighth (at most one segment) is kept for
//    rewriting.
//
// Threads: `io_threads` of its own, which work for a call while it lasts, and RocksDB's.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/base/units.h"
#include "kvstore/media/spill_store.h"

namespace kvt {

struct RocksDbSpillOptions {
  // Made if it is missing. Of one store at a time.
  std::string folder;
  // Of all files in the folder; 0: none.
  uint64_t quota_bytes = 0;
  // Writes are refused that would leave the file system less than this.
  uint64_t free_bytes_min = 256 * kMiB;
  // O_DIRECT for records: the page cache would hold a second copy of what memory had no room for.
  bool direct_io = true;
  // Of each thread that writes a segment: what it gathers before it writes to the disk.
  uint64_t write_buffer_bytes = kMiB;
  // A batch of more than this becomes several segments; small segments are merged up to it.
  uint64_t segment_bytes = 256 * kMiB;
  // More than these make RocksDB's list of files dear to change; then the smallest become one.
  uint64_t segments_max = 4096;
  // Memory for entries and their indices.
  uint64_t entry_cache_bytes = 32 * kMiB;
  // Threads that read and write records, in addition to the caller's.
  int io_threads = 3;
  // RocksDB's, for compacting entries.
  int background_jobs = 2;
};

// Errors: InvalidArgument (an option); FailedPrecondition (the folder's format is not ours or its
// file system has no O_DIRECT); Unavailable (in use by another process, I/O error); DataLoss
// (RocksDB's own files are damaged: the folder must be emptied). Each names the folder and the
// remedy.
absl::StatusOr<std::unique_ptr<SpillStore>> OpenRocksDbSpillStore(
    const RocksDbSpillOptions& options);

}  // namespace kvt
