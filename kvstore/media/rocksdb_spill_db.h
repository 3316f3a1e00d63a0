// RocksDB as the spill store uses it: entries by key in one column family (log, memtable,
// compaction), and segments as ingested files in the other. Translates its statuses:
//
//   no space -> ResourceExhausted; damaged or missing file -> DataLoss; other I/O error ->
//   Unavailable
//
// A write that fails can leave RocksDB refusing all that follow. Such a call probes the disk; when
// it takes the probe, the database is opened anew under the calls, and generation() changes: what
// failed calls wrote may be there or not. Thread-safe; owned by the store.
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

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/base/mutex.h"
#include "kvstore/media/rocksdb_spill_fs.h"
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
  // Calls `use_bytes` with its bytes, if there is one, and returns what that does. NotFound: the
  // segment is gone.
  absl::Status ReadRecord(uint64_t sequence,
                          absl::FunctionRef<absl::Status(absl::string_view)> use_bytes) const;

  // Records of `count` sequences that follow each other, in one segment, `bytes` together: read at
  // once. Calls `use_bytes` for each that is there, in order, up to the first that is not.
  absl::Status ReadRun(uint64_t first, uint64_t count, uint64_t bytes,
                       absl::FunctionRef<void(uint64_t, absl::string_view)> use_bytes) const;

  // Free bytes of the file system.
  [[nodiscard]] uint64_t FreeBytes() const;
  // How often the database was opened.
  [[nodiscard]] uint64_t generation() const;

 private:
  // The database stays open while one lives.
  class Use {
   public:
    explicit Use(const RocksDbSpillDb& db);
    ~Use();
    // Unavailable: it could not be opened anew.
    [[nodiscard]] absl::Status status() const;

   private:
    const RocksDbSpillDb& db_;
  };

  // Writes of entries and of the MANIFEST, one at a time: RocksDB fails an assertion when it is
  // asked to take files in after such a write has failed.
  class Turn {
   public:
    explicit Turn(RocksDbSpillDb& db);
    ~Turn();

   private:
    RocksDbSpillDb& db_;
  };

  RocksDbSpillDb() = default;
  absl::Status OpenDb();
  void CloseDb();
  absl::Status Translate(const rocksdb::Status& status, absl::string_view what) const;
  // Runs `call`, and once more when the database could be opened anew.
  absl::Status Persisting(absl::string_view what, absl::FunctionRef<rocksdb::Status()> call);
  // With the turn.
  absl::Status Reopen();
  [[nodiscard]] bool refusing() const;
  void SetRefusing();
  absl::Status Probe() const;

  std::string folder_;
  std::string staging_;
  std::shared_ptr<RocksDbSpillFs> fs_;
  std::unique_ptr<rocksdb::Env> env_;
  rocksdb::DBOptions db_options_;
  std::vector<rocksdb::ColumnFamilyDescriptor> families_;
  rocksdb::Options writer_options_;
  rocksdb::EnvOptions writer_env_options_;
  // Changed by OpenDb and CloseDb only, when there is no Use.
  std::unique_ptr<rocksdb::DB> db_;
  rocksdb::ColumnFamilyHandle* entries_ = nullptr;
  rocksdb::ColumnFamilyHandle* values_ = nullptr;

  mutable Mutex mu_;
  mutable CondVar changed_;
  mutable int uses_ ABSL_GUARDED_BY(mu_) = 0;
  bool reopening_ ABSL_GUARDED_BY(mu_) = false;
  bool persisting_ ABSL_GUARDED_BY(mu_) = false;
  bool refusing_ ABSL_GUARDED_BY(mu_) = false;  // a write failed since it was opened
  uint64_t generation_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvt
