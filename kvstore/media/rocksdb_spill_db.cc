#include "kvstore/media/rocksdb_spill_db.h"

#include <rocksdb/cache.h>
#include <rocksdb/convenience.h>
#include <rocksdb/env.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/listener.h>
#include <rocksdb/table.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kvstore/media/rocksdb_spill_format.h"

namespace kvt {
namespace {

constexpr uint64_t kEntryMemtableBytes = 8 * kMiB;
constexpr uint64_t kEntryFileBytes = 16 * kMiB;
constexpr int kOpenFilesMin = 64;
constexpr int kOpenFilesMax = 8192;
constexpr absl::Duration kReopenWait = absl::Seconds(5);
// Logs, MANIFEST, OPTIONS, CURRENT.
constexpr uint64_t kOwnFilesBytes = kMiB;

class NoAutoRecovery final : public rocksdb::EventListener {
 public:
  void OnErrorRecoveryBegin(rocksdb::BackgroundErrorReason, rocksdb::Status,
                            bool* auto_recovery) override {
    *auto_recovery = false;
  }
};

// Half of what the process may open: every segment's file stays open while there is room.
int OpenFilesMax() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kOpenFilesMin;
  const uint64_t half = limit.rlim_cur / 2;
  return static_cast<int>(std::clamp<uint64_t>(half, kOpenFilesMin, kOpenFilesMax));
}

rocksdb::DBOptions DbOptionsOf(const RocksDbSpillOptions& options) {
  rocksdb::DBOptions db;
  db.create_if_missing = true;
  db.create_missing_column_families = true;
  db.max_background_jobs = options.background_jobs;
  db.max_open_files = OpenFilesMax();
  db.use_direct_reads = options.direct_io;
  db.use_direct_io_for_flush_and_compaction = options.direct_io;
  db.writable_file_max_buffer_size = options.write_buffer_bytes;
  // Preallocated space would count as ours without holding anything.
  db.allow_fallocate = false;
  db.max_manifest_file_size = kOwnFilesBytes / 2;
  db.info_log_level = rocksdb::WARN_LEVEL;
  db.max_log_file_size = 128 * kKiB;
  db.keep_log_file_num = 2;
  db.stats_dump_period_sec = 0;
  db.stats_persist_period_sec = 0;
  // After an error it is opened anew, by us: RocksDB's own ways back wait for seconds, give up
  // after some errors, and after others end the process (its package keeps its assertions).
  db.max_bgerror_resume_count = 0;
  db.listeners.push_back(std::make_shared<NoAutoRecovery>());
  db.avoid_flush_during_recovery = true;  // opens on a full disk
  // Up to the first torn entry of the log: what was synced lies before it.
  db.wal_recovery_mode = rocksdb::WALRecoveryMode::kPointInTimeRecovery;
  return db;
}

rocksdb::ColumnFamilyOptions EntryOptionsOf(const RocksDbSpillOptions& options) {
  rocksdb::ColumnFamilyOptions entries;
  entries.compression = rocksdb::kNoCompression;
  entries.write_buffer_size = kEntryMemtableBytes;
  entries.target_file_size_base = kEntryFileBytes;
  entries.max_bytes_for_level_base = 4 * kEntryFileBytes;
  rocksdb::BlockBasedTableOptions table;
  table.checksum = rocksdb::kXXH3;
  table.block_cache = rocksdb::NewLRUCache(options.entry_cache_bytes);
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  table.cache_index_and_filter_blocks = true;
  table.pin_l0_filter_and_index_blocks_in_cache = true;
  entries.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return entries;
}

rocksdb::ColumnFamilyOptions ValueOptionsOf() {
  rocksdb::ColumnFamilyOptions values;
  values.compression = rocksdb::kNoCompression;
  // Segments never overlap and are dropped whole: there is nothing to compact.
  values.disable_auto_compactions = true;
  rocksdb::BlockBasedTableOptions table;
  // A record is a block of its own, and its checksum is in its entry: a second pass would find no
  // more.
  table.block_size = kKiB;
  table.checksum = rocksdb::kNoChecksum;
  table.no_block_cache = true;
  values.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return values;
}

}  // namespace

// ---- opening ----

absl::StatusOr<std::unique_ptr<RocksDbSpillDb>> RocksDbSpillDb::Open(
    const RocksDbSpillOptions& options, const std::shared_ptr<rocksdb::FileSystem>& file_system) {
  std::unique_ptr<RocksDbSpillDb> self(new RocksDbSpillDb());
  self->folder_ = options.folder;
  self->staging_ = absl::StrCat(options.folder, "/staging");
  self->fs_ = std::make_shared<RocksDbSpillFs>(
      file_system != nullptr ? file_system : rocksdb::FileSystem::Default());
  self->env_ = rocksdb::NewCompositeEnv(self->fs_);
  self->db_options_ = DbOptionsOf(options);
  self->db_options_.env = self->env_.get();
  const rocksdb::ColumnFamilyOptions values = ValueOptionsOf();
  self->families_ = {{rocksdb::kDefaultColumnFamilyName, EntryOptionsOf(options)},
                     {"values", values}};
  self->writer_options_ = rocksdb::Options(self->db_options_, values);
  self->writer_env_options_ = rocksdb::EnvOptions(self->db_options_);
  self->writer_env_options_.use_direct_writes = options.direct_io;
  self->writer_env_options_.writable_file_max_buffer_size = options.write_buffer_bytes;
  KVT_RETURN_IF_ERROR(self->OpenDb());

  // Nobody else has the folder now.
  std::vector<std::string> left;
  const rocksdb::Status listed = self->env_->GetChildren(self->staging_, &left);
  if (!listed.ok()) return self->Translate(listed, "open staging");
  for (const std::string& name : left) {
    if (name != "." && name != "..")
      (void)self->env_->DeleteFile(absl::StrCat(self->staging_, "/", name));
  }
  return self;
}

absl::Status RocksDbSpillDb::OpenDb() {
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* db = nullptr;
  const rocksdb::Status opened =
      rocksdb::DB::Open(db_options_, absl::StrCat(folder_, "/db"), families_, &handles, &db);
  if (!opened.ok()) {
    const absl::Status status = Translate(opened, "open");
    if (!absl::IsDataLoss(status)) return status;
    return absl::DataLossError(
        absl::StrCat(status.message(), "; stop the store and empty the folder"));
  }
  db_.reset(db);
  entries_ = handles[0];
  values_ = handles[1];
  return absl::OkStatus();
}

void RocksDbSpillDb::CloseDb() {
  if (db_ == nullptr) return;
  (void)db_->DestroyColumnFamilyHandle(entries_);
  (void)db_->DestroyColumnFamilyHandle(values_);
  (void)db_->Close();
  db_.reset();
  fs_->Forget();
}

RocksDbSpillDb::~RocksDbSpillDb() { CloseDb(); }

uint64_t RocksDbSpillDb::generation() const {
  MutexLock lock(mu_);
  return generation_;
}

RocksDbSpillDb::Use::Use(const RocksDbSpillDb& db) : db_(db) {
  MutexLock lock(db_.mu_);
  while (db_.reopening_) (void)db_.changed_.WaitFor(db_.mu_, kReopenWait);
  ++db_.uses_;
}

RocksDbSpillDb::Use::~Use() {
  MutexLock lock(db_.mu_);
  if (--db_.uses_ == 0) db_.changed_.NotifyAll();
}

absl::Status RocksDbSpillDb::Use::status() const {
  if (db_.db_ != nullptr) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("spill folder ", db_.folder_, ": could not be opened again"));
}

absl::Status RocksDbSpillDb::Probe() const {
  const std::string path = absl::StrCat(staging_, "/probe");
  const std::string block(kEntryMemtableBytes, 'p');  // as much as opening may write
  const rocksdb::Status status =
      rocksdb::WriteStringToFile(db_options_.env, block, path, /*should_sync=*/true);
  (void)db_options_.env->DeleteFile(path);
  return Translate(status, "probe the disk");
}

absl::Status RocksDbSpillDb::Reopen() {
  KVT_RETURN_IF_ERROR(Probe());
  MutexLock lock(mu_);
  reopening_ = true;
  // A scan whose visitor writes waits for itself here.
  const absl::Time until = RealClock::Get().Now() + kReopenWait;
  while (uses_ > 0 && RealClock::Get().Now() < until) {
    (void)changed_.WaitFor(mu_, until - RealClock::Get().Now());
  }
  absl::Status status = absl::UnavailableError(absl::StrCat(
      "spill folder ", folder_, ": cannot be opened again while a scan or a read goes on"));
  if (uses_ == 0) {
    CloseDb();
    status = OpenDb();
    ++generation_;
    refusing_ = !status.ok();
  }
  reopening_ = false;
  changed_.NotifyAll();
  return status;
}

bool RocksDbSpillDb::refusing() const {
  MutexLock lock(mu_);
  return refusing_;
}

void RocksDbSpillDb::SetRefusing() {
  MutexLock lock(mu_);
  refusing_ = true;
}

RocksDbSpillDb::Turn::Turn(RocksDbSpillDb& db) : db_(db) {
  MutexLock lock(db_.mu_);
  while (db_.persisting_) (void)db_.changed_.WaitFor(db_.mu_, kReopenWait);
  db_.persisting_ = true;
}

RocksDbSpillDb::Turn::~Turn() {
  MutexLock lock(db_.mu_);
  db_.persisting_ = false;
  db_.changed_.NotifyAll();
}

absl::Status RocksDbSpillDb::Persisting(absl::string_view what,
                                        absl::FunctionRef<rocksdb::Status()> call) {
  const Turn turn(*this);
  absl::Status status;
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (refusing()) {
      const absl::Status reopened = Reopen();
      if (!reopened.ok()) return status.ok() ? reopened : status;
    }
    const Use use(*this);
    status = use.status();
    if (status.ok()) status = Translate(call(), what);
    if (status.ok()) return status;
    SetRefusing();
  }
  return status;
}

absl::Status RocksDbSpillDb::Translate(const rocksdb::Status& status,
                                       absl::string_view what) const {
  if (status.ok()) return absl::OkStatus();
  const std::string message =
      absl::StrCat("spill folder ", folder_, ": ", what, ": ", status.ToString());
  if (status.IsNotFound()) return absl::NotFoundError(message);
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(message);
  if (status.IsCorruption() || status.IsPathNotFound()) return absl::DataLossError(message);
  if (status.IsInvalidArgument() || status.IsNotSupported()) return absl::InternalError(message);
  return absl::UnavailableError(message);
}

// ---- entries ----

std::vector<absl::StatusOr<std::string>> RocksDbSpillDb::GetEntries(
    absl::Span<const std::string> keys) const {
  std::vector<absl::StatusOr<std::string>> entries;
  if (keys.empty()) return entries;
  entries.reserve(keys.size());
  const std::vector<rocksdb::Slice> slices(keys.begin(), keys.end());
  const Use use(*this);
  if (!use.status().ok()) {
    entries.assign(keys.size(), use.status());
    return entries;
  }
  std::vector<rocksdb::PinnableSlice> results(keys.size());
  std::vector<rocksdb::Status> statuses(keys.size());
  db_->MultiGet(rocksdb::ReadOptions(), entries_, keys.size(), slices.data(), results.data(),
                statuses.data());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (statuses[i].ok()) {
      entries.emplace_back(results[i].ToString());
    } else {
      entries.emplace_back(Translate(statuses[i], "read entry"));
    }
  }
  return entries;
}

absl::Status RocksDbSpillDb::WriteEntries(rocksdb::WriteBatch* batch) {
  rocksdb::WriteOptions options;
  options.sync = true;
  return Persisting("write entries", [&] { return db_->Write(options, batch); });
}

absl::Status RocksDbSpillDb::ScanEntries(
    const std::function<bool(absl::string_view, absl::string_view)>& visit) const {
  const Use use(*this);
  KVT_RETURN_IF_ERROR(use.status());
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  options.readahead_size = 2 * kMiB;
  const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options, entries_));
  for (it->SeekToFirst(); it->Valid(); it->Next()) {
    const rocksdb::Slice key = it->key();
    const rocksdb::Slice value = it->value();
    if (!visit({key.data(), key.size()}, {value.data(), value.size()})) return absl::OkStatus();
  }
  return Translate(it->status(), "scan entries");
}

absl::Status RocksDbSpillDb::PurgeEntries() {
  rocksdb::FlushOptions flush;
  flush.allow_write_stall = true;
  KVT_RETURN_IF_ERROR(Persisting("flush entries", [&] { return db_->Flush(flush, entries_); }));
  const Use use(*this);
  KVT_RETURN_IF_ERROR(use.status());
  rocksdb::CompactRangeOptions range;
  range.bottommost_level_compaction = rocksdb::BottommostLevelCompaction::kForceOptimized;
  range.allow_write_stall = true;
  // Beside writes: it takes long.
  const rocksdb::Status compacted = db_->CompactRange(range, entries_, nullptr, nullptr);
  if (!compacted.ok()) {
    SetRefusing();
    return Translate(compacted, "compact entries");
  }
  // Deletes what is obsolete before it returns; RocksDB would do it some time later.
  KVT_RETURN_IF_ERROR(Translate(db_->DisableFileDeletions(), "purge"));
  return Translate(db_->EnableFileDeletions(/*force=*/false), "purge");
}

uint64_t RocksDbSpillDb::EntryDiskBytes() const {
  const Use use(*this);
  if (!use.status().ok()) return kOwnFilesBytes;
  uint64_t tables = 0;
  uint64_t memory = 0;
  (void)db_->GetIntProperty(entries_, rocksdb::DB::Properties::kTotalSstFilesSize, &tables);
  // The log holds about what the memtables do.
  (void)db_->GetIntProperty(entries_, rocksdb::DB::Properties::kCurSizeAllMemTables, &memory);
  return tables + memory + kOwnFilesBytes;
}

// ---- segments ----

RocksDbSpillDb::Writer::Writer(RocksDbSpillDb& db, std::string path)
    : db_(db), path_(std::move(path)) {}

RocksDbSpillDb::Writer::~Writer() {
  file_.reset();
  // Once ingested it has another name.
  (void)db_.writer_options_.env->DeleteFile(path_);
}

absl::Status RocksDbSpillDb::Writer::Open() {
  file_ = std::make_unique<rocksdb::SstFileWriter>(db_.writer_env_options_, db_.writer_options_);
  return db_.Translate(file_->Open(path_), "begin segment");
}

absl::Status RocksDbSpillDb::Writer::Add(uint64_t sequence, const void* bytes, size_t size) {
  const rocksdb::Slice value(static_cast<const char*>(bytes), size);
  return db_.Translate(file_->Put(EncodeSpillSequence(sequence), value), "write segment");
}

absl::StatusOr<uint64_t> RocksDbSpillDb::Writer::Finish() {
  rocksdb::ExternalSstFileInfo info;
  const absl::Status status = db_.Translate(file_->Finish(&info), "finish segment");
  file_.reset();
  KVT_RETURN_IF_ERROR(status);
  return info.file_size;
}

std::unique_ptr<RocksDbSpillDb::Writer> RocksDbSpillDb::NewWriter(uint64_t first) {
  return std::make_unique<Writer>(*this, absl::StrCat(staging_, "/", first, ".sst"));
}

absl::Status RocksDbSpillDb::Ingest(absl::Span<const std::string> paths) {
  rocksdb::IngestExternalFileOptions options;
  options.move_files = true;
  options.failed_move_fall_back_to_copy = false;
  options.snapshot_consistency = false;
  options.write_global_seqno = false;
  options.fail_if_not_bottommost_level = true;
  const std::vector<std::string> files(paths.begin(), paths.end());
  return Persisting("take segments in", [&] {
    const uint64_t number = fs_->BeginIngestion();
    rocksdb::Status status = db_->IngestExternalFile(values_, files, options);
    fs_->EndIngestion(number, files, status.ok());
    return status;
  });
}

absl::StatusOr<std::vector<SpillSegment>> RocksDbSpillDb::ListSegments() const {
  const Use use(*this);
  KVT_RETURN_IF_ERROR(use.status());
  rocksdb::ColumnFamilyMetaData meta;
  db_->GetColumnFamilyMetaData(values_, &meta);
  std::vector<SpillSegment> segments;
  for (const auto& level : meta.levels) {
    for (const auto& file : level.files) {
      SpillSegment segment;
      if (!DecodeSpillSequence(file.smallestkey, &segment.first) ||
          !DecodeSpillSequence(file.largestkey, &segment.last) || segment.first >= segment.last) {
        return absl::DataLossError(
            absl::StrCat("spill folder ", folder_, ": ", file.name,
                         " is no segment; stop the store and empty the folder"));
      }
      segment.disk_bytes = file.size;
      segments.push_back(segment);
    }
  }
  return segments;
}

absl::Status RocksDbSpillDb::DropSegments(absl::Span<const SpillSegment> segments) {
  if (segments.empty()) return absl::OkStatus();
  std::vector<std::string> keys;
  keys.reserve(segments.size() * 2);
  for (const SpillSegment& segment : segments) {
    keys.push_back(EncodeSpillSequence(segment.first));
    keys.push_back(EncodeSpillSequence(segment.last));
  }
  std::vector<rocksdb::Slice> slices(keys.begin(), keys.end());
  std::vector<rocksdb::RangePtr> ranges;
  for (size_t i = 0; i < slices.size(); i += 2) ranges.emplace_back(&slices[i], &slices[i + 1]);
  return Persisting("drop segments", [&] {
    return rocksdb::DeleteFilesInRanges(db_.get(), values_, ranges.data(), ranges.size());
  });
}

absl::Status RocksDbSpillDb::ReadRecord(
    uint64_t sequence, absl::FunctionRef<absl::Status(absl::string_view)> use_bytes) const {
  const Use use(*this);
  KVT_RETURN_IF_ERROR(use.status());
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  const std::string key = EncodeSpillSequence(sequence);
  rocksdb::PinnableSlice value;
  const rocksdb::Status status = db_->Get(options, values_, key, &value);
  if (!status.ok()) return Translate(status, "read record");
  return use_bytes({value.data(), value.size()});
}

absl::Status RocksDbSpillDb::ReadRun(
    uint64_t first, uint64_t count, uint64_t bytes,
    absl::FunctionRef<void(uint64_t, absl::string_view)> use_bytes) const {
  const Use use(*this);
  KVT_RETURN_IF_ERROR(use.status());
  rocksdb::ReadOptions options;
  options.fill_cache = false;
  options.readahead_size = bytes;  // the whole run with its first record
  const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options, values_));
  it->Seek(EncodeSpillSequence(first));
  for (uint64_t n = 0; n < count && it->Valid(); ++n) {
    const rocksdb::Slice key = it->key();
    uint64_t sequence = 0;
    if (!DecodeSpillSequence({key.data(), key.size()}, &sequence) || sequence != first + n) break;
    const rocksdb::Slice value = it->value();
    use_bytes(sequence, {value.data(), value.size()});
    if (n + 1 < count) it->Next();
  }
  return Translate(it->status(), "read records");
}

uint64_t RocksDbSpillDb::FreeBytes() const {
  struct statvfs fs {};
  if (statvfs(folder_.c_str(), &fs) != 0) return 0;
  return uint64_t{fs.f_bavail} * fs.f_frsize;
}

}  // namespace kvt
