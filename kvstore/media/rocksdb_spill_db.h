// RocksDB as the spill store uses it: entries by key in one column family (log, memtable,
// compaction), and segments as ingested files in the other. Translates its statuses:
//
//   no space -> ResourceExhausted; damaged or missing file -> DataLoss; other I/O error ->
//   Unavailable
//
// A write that fails leaves RocksDB refusing writes; each call that writes first has it resume.
// Thread-safe; owned by the store.
#pragma once

#include <rocksdb/db.h>
#include <rocksdb/file_system.h>
#include <rocksdb/options.h>
#include <rocksdb/sst_file_writer.h>
#include <rocksdb/write_batch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvstore/media/rocksdb_spill_segments.h"
#include "kvstore/media/rocksdb_spill_store.h"

namespace kvt {

class RocksDbSpillDb {
 public:
  // Opens or makes folder/db and empties folder/staging; the folder's FORMAT has been checked.
  static absl::StatusOr<std::unique_ptr<RocksDbSpillDb>> Open(
      const RocksDbSpillOptions& options, const std::shared_ptr<rocksdb::FileSystem>& file_system);
  ~RocksDbSpillDb();

  // ---- entries ----

  // NotFound where a key has none.
  std::vector<absl::StatusOr<std::string>> GetEntries(absl::Span<const std::string> keys) const;
  // All of it or nothing, durable.
  absl::Status WriteEntries(rocksdb::WriteBatch* batch);
  // All entries; false stops.
  absl::Status ScanEntries(
      const std::function<bool(absl::string_view key, absl::string_view value)>& visit) const;
  // Erased entries' bytes leave the disk: flush, compaction, old logs.
  absl::Status PurgeEntries();
  // Of the log, tables and RocksDB's own files.
  [[nodiscard]] uint64_t EntryDiskBytes() const;

  // ---- segments ----

  // A segment being written; its file goes with it unless it is ingested.
  class Writer {
   public:
    Writer(RocksDbSpillDb& db, std::string path);
    ~Writer();
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;
    absl::Status Open();
    // Ascending sequences.
    absl::Status Add(uint64_t sequence, const void* bytes, size_t size);
    // Durable; its size.
    absl::StatusOr<uint64_t> Finish();
    [[nodiscard]] const std::string& path() const { return path_; }

   private:
    RocksDbSpillDb& db_;
    const std::string path_;
    std::unique_ptr<rocksdb::SstFileWriter> file_;
  };
  std::unique_ptr<Writer> NewWriter(uint64_t first);
  // All of them or none; durable.
  absl::Status Ingest(absl::Span<const std::string> paths);
  // As found at open.
  absl::StatusOr<std::vector<SpillSegment>> ListSegments() const;
  absl::Status DropSegments(absl::Span<const SpillSegment> segments);
  // `bytes` is valid until `value` changes. NotFound: the segment is gone.
  absl::Status ReadRecord(uint64_t sequence, rocksdb::PinnableSlice* value) const;

  // Free bytes of the file system.
  [[nodiscard]] uint64_t FreeBytes() const;

 private:
  RocksDbSpillDb() = default;
  absl::Status Translate(const rocksdb::Status& status, absl::string_view what) const;
  // Runs `call`, and once more after RocksDB could resume.
  absl::Status Resuming(absl::string_view what, const std::function<rocksdb::Status()>& call);

  std::string folder_;
  std::string staging_;
  std::unique_ptr<rocksdb::Env> env_;
  rocksdb::Options writer_options_;
  rocksdb::EnvOptions writer_env_options_;
  std::unique_ptr<rocksdb::DB> db_;
  rocksdb::ColumnFamilyHandle* entries_ = nullptr;
  rocksdb::ColumnFamilyHandle* values_ = nullptr;
};

}  // namespace kvt
