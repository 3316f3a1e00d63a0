#include "kvstore/media/rocksdb_spill_store.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/media/rocksdb_io_pool.h"
#include "kvstore/media/rocksdb_spill_core.h"
#include "kvstore/media/rocksdb_spill_db.h"
#include "kvstore/media/rocksdb_spill_folder.h"
#include "kvstore/media/rocksdb_spill_format.h"
#include "kvstore/media/rocksdb_spill_hooks.h"

namespace kvt {
namespace {

// A part of a batch that one thread writes; below two of these a batch is not worth a second file.
constexpr uint64_t kLaneBytesMin = 4 * kMiB;
// A record that moves while it is read is looked up again, so often.
constexpr int kReadAttempts = 8;
// Of records that are read at once.
constexpr uint64_t kRunBytesMin = 256 * kKiB;
constexpr uint64_t kRunBytesMax = kMiB;
// From this size on records are faster one by one: more reads under way.
constexpr uint64_t kRunRecordMax = 64 * kKiB;
constexpr size_t kLookupMax = 4096;  // entries asked for at once

class RocksDbSpillStore final : public SpillStore {
 public:
  explicit RocksDbSpillStore(const RocksDbSpillOptions& options, std::unique_ptr<RocksDbSpillDb> db)
      : options_(options), db_(std::move(db)), core_(options, *db_), pool_(options.io_threads) {}

  absl::Status Start() { return core_.Recover(); }
  absl::Status Write(absl::Span<const SpillWrite> batch) override;
  void Read(absl::Span<const SpillRead> reads, absl::Span<absl::Status> statuses) override;
  absl::Status Erase(absl::Span<const SpillKey> keys) override;
  absl::Status Reclaim() override { return core_.Reclaim(); }
  absl::Status Scan(const SpillVisitor& visit) override { return core_.Scan(visit); }
  [[nodiscard]] SpillUsage Usage() const override { return core_.Usage(); }

 private:
  // Records [begin, end) of a batch, in one file.
  struct Lane {
    size_t begin = 0;
    size_t end = 0;
    uint64_t first = 0;  // sequence
    std::unique_ptr<RocksDbSpillDb::Writer> writer;
    uint64_t disk_bytes = 0;
    absl::Status status;
  };
  absl::Status WriteAll(absl::Span<const SpillWrite* const> batch, uint64_t bytes);
  std::vector<Lane> Split(absl::Span<const SpillWrite* const> batch, uint64_t bytes) const;
  static absl::Status WriteLane(absl::Span<const SpillWrite* const> batch, Lane& lane,
                                std::vector<SpillChange>& changes);
  // A read whose entry was found.
  struct PlacedRead {
    const SpillRead* read;
    uint64_t sequence;
    uint64_t checksum;
    absl::Status* status;
  };
  // Sequences that follow each other.
  void ReadRun(absl::Span<const PlacedRead> run);
  void ReadSome(absl::Span<const SpillRead> reads, absl::Span<absl::Status> statuses);
  absl::Status ReadOne(const SpillRead& read, uint64_t sequence, uint64_t checksum);

  const RocksDbSpillOptions options_;
  const std::unique_ptr<RocksDbSpillDb> db_;
  SpillCore core_;
  RocksDbIoPool pool_;
};

// ---- writing ----

absl::Status RocksDbSpillStore::Write(absl::Span<const SpillWrite> batch) {
  if (batch.empty()) return absl::OkStatus();
  // Of several of one key the last counts.
  absl::flat_hash_map<std::string, size_t> last;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].meta.size() > kSpillMetaBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("a spilled record's meta has ",
                                                     batch[i].meta.size(), " bytes, at most ",
                                                     kSpillMetaBytesMax));
    }
    last[EncodeSpillKey(batch[i].key)] = i;
  }
  std::vector<const SpillWrite*> kept;
  kept.reserve(last.size());
  uint64_t bytes = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (last.size() != batch.size() && last[EncodeSpillKey(batch[i].key)] != i) continue;
    kept.push_back(&batch[i]);
    bytes += SpillDiskBytesMax(batch[i].bytes.size(), batch[i].meta.size());
  }
  absl::Status status = core_.Reserve(bytes);
  if (status.ok()) {
    status = WriteAll(kept, bytes);
    core_.Unreserve(bytes);
  }
  core_.SetFailure(status);
  if (status.ok()) core_.Tidy();
  return status;
}

std::vector<RocksDbSpillStore::Lane> RocksDbSpillStore::Split(
    absl::Span<const SpillWrite* const> batch, uint64_t bytes) const {
  const uint64_t lanes =
      std::clamp<uint64_t>(bytes / kLaneBytesMin, 1, static_cast<uint64_t>(pool_.threads()) + 1);
  const uint64_t lane_bytes = std::min(CeilDiv(bytes, lanes), core_.segment_bytes());
  std::vector<Lane> split;
  uint64_t filled = lane_bytes;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (filled >= lane_bytes) {
      split.emplace_back();
      split.back().begin = i;
      filled = 0;
    }
    filled += SpillDiskBytesMax(batch[i]->bytes.size(), batch[i]->meta.size());
    split.back().end = i + 1;
  }
  return split;
}

absl::Status RocksDbSpillStore::WriteLane(absl::Span<const SpillWrite* const> batch, Lane& lane,
                                          std::vector<SpillChange>& changes) {
  KVT_RETURN_IF_ERROR(lane.writer->Open());
  std::vector<SpillKey> keys;
  keys.reserve(lane.end - lane.begin);
  for (size_t i = lane.begin; i < lane.end; ++i) {
    const SpillWrite& write = *batch[i];
    const uint64_t sequence = lane.first + keys.size();
    keys.push_back(write.key);
    KVT_RETURN_IF_ERROR(lane.writer->Add(sequence, write.bytes.data(), write.bytes.size()));
    SpillEntry entry;
    entry.sequence = sequence;
    entry.bytes = write.bytes.size();
    entry.checksum = SpillRecordChecksum(write.key, write.bytes.data(), write.bytes.size());
    entry.meta = write.meta;
    changes[i].key = write.key;
    changes[i].entry = EncodeSpillEntry(write.key, entry);
  }
  const std::string contents = EncodeSpillContents(lane.first, keys);
  KVT_RETURN_IF_ERROR(lane.writer->Add(lane.first + keys.size(), contents.data(), contents.size()));
  KVT_ASSIGN_OR_RETURN(lane.disk_bytes, lane.writer->Finish());
  return absl::OkStatus();
}

absl::Status RocksDbSpillStore::WriteAll(absl::Span<const SpillWrite* const> batch,
                                         uint64_t bytes) {
  std::vector<Lane> lanes = Split(batch, bytes);
  for (Lane& lane : lanes) {
    lane.first = core_.TakeSequences(lane.end - lane.begin + 1);
    lane.writer = db_->NewWriter(lane.first);
  }
  std::vector<SpillChange> changes(batch.size());
  pool_.ForEach(lanes.size(),
                [&](size_t i) { lanes[i].status = WriteLane(batch, lanes[i], changes); });
  std::vector<SpillCore::NewSegment> segments;
  for (const Lane& lane : lanes) {
    KVT_RETURN_IF_ERROR(lane.status);
    segments.push_back(
        {lane.first, lane.first + (lane.end - lane.begin), lane.disk_bytes, lane.writer->path()});
  }
  return core_.Commit(segments, changes);
}

// ---- reading ----

absl::Status RocksDbSpillStore::ReadOne(const SpillRead& read, uint64_t sequence,
                                        uint64_t checksum) {
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    const absl::Status status = db_->ReadRecord(sequence, [&](absl::string_view bytes) {
      if (bytes.size() == read.bytes.size() &&
          CopySpillRecord(read.key, read.bytes.data(), bytes.data(), bytes.size()) == checksum) {
        return absl::OkStatus();
      }
      return absl::DataLossError("spilled record is damaged");
    });
    if (status.ok() || (!absl::IsNotFound(status) && !absl::IsDataLoss(status))) return status;
    // Damaged, or moved or replaced since its entry was read.
    KVT_ASSIGN_OR_RETURN(const SpillCore::Found now, core_.Lookup(read.key));
    if (now.sequence == sequence) {
      KVT_RETURN_IF_ERROR(core_.EraseIf(read.key, sequence));
      return absl::DataLossError(absl::StrCat(status.message(), " (erased)"));
    }
    if (now.bytes != read.bytes.size()) {
      return absl::NotFoundError("replaced by a record of another size while it was read");
    }
    sequence = now.sequence;
    checksum = now.checksum;
  }
  return absl::UnavailableError("the spilled record moved too often while it was read");
}

void RocksDbSpillStore::ReadSome(absl::Span<const SpillRead> reads,
                                 absl::Span<absl::Status> statuses) {
  std::vector<SpillKey> keys(reads.size());
  for (size_t i = 0; i < reads.size(); ++i) keys[i] = reads[i].key;
  const std::vector<absl::StatusOr<SpillCore::Found>> found = core_.Lookup(keys);
  std::vector<size_t> order;
  for (size_t i = 0; i < reads.size(); ++i) {
    statuses[i] = found[i].status();
    if (absl::IsDataLoss(statuses[i])) (void)Erase({&reads[i].key, 1});
    if (!found[i].ok()) continue;
    if (found[i]->bytes != reads[i].bytes.size()) {
      const absl::Status erased = core_.EraseIf(reads[i].key, found[i]->sequence);
      statuses[i] = absl::DataLossError(absl::StrCat("spilled record has ", found[i]->bytes,
                                                     " bytes, asked for ", reads[i].bytes.size(),
                                                     erased.ok() ? " (erased)" : ""));
      continue;
    }
    order.push_back(i);
  }
  // In the disk's order.
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return found[a]->sequence < found[b]->sequence; });
  // Neighbours on the disk are read at once, as long as there is enough for every thread.
  uint64_t bytes = 0;
  for (const size_t i : order) bytes += reads[i].bytes.size();
  const uint64_t run_bytes =
      std::clamp(bytes / (static_cast<uint64_t>(pool_.threads()) + 1), kRunBytesMin, kRunBytesMax);
  std::vector<std::vector<PlacedRead>> runs;
  uint64_t filled = 0;
  for (const size_t i : order) {
    const PlacedRead placed{&reads[i], found[i]->sequence, found[i]->checksum, &statuses[i]};
    filled += reads[i].bytes.size();
    if (runs.empty() || reads[i].bytes.size() >= kRunRecordMax || filled > run_bytes ||
        runs.back().back().sequence + 1 != placed.sequence) {
      runs.emplace_back();
      filled = reads[i].bytes.size();
    }
    runs.back().push_back(placed);
  }
  pool_.ForEach(runs.size(), [&](size_t n) { ReadRun(runs[n]); });
}

void RocksDbSpillStore::ReadRun(absl::Span<const PlacedRead> run) {
  size_t read = 0;
  std::vector<bool> whole(run.size());
  if (run.size() > 1) {
    uint64_t bytes = 0;
    for (const PlacedRead& placed : run) bytes += placed.read->bytes.size();
    // What goes wrong is found out record by record, below.
    (void)db_->ReadRun(run[0].sequence, run.size(), bytes, [&](uint64_t, absl::string_view from) {
      const SpillRead& to = *run[read].read;
      whole[read] =
          from.size() == to.bytes.size() &&
          CopySpillRecord(to.key, to.bytes.data(), from.data(), from.size()) == run[read].checksum;
      ++read;
    });
  }
  for (size_t n = 0; n < run.size(); ++n) {
    *run[n].status =
        whole[n] ? absl::OkStatus() : ReadOne(*run[n].read, run[n].sequence, run[n].checksum);
  }
}

void RocksDbSpillStore::Read(absl::Span<const SpillRead> reads, absl::Span<absl::Status> statuses) {
  KVT_CHECK(reads.size() == statuses.size(), reads.size(), " reads, ", statuses.size(),
            " statuses");
  for (size_t at = 0; at < reads.size(); at += kLookupMax) {
    ReadSome(reads.subspan(at, kLookupMax), statuses.subspan(at, kLookupMax));
  }
}

// ---- erasing ----

absl::Status RocksDbSpillStore::Erase(absl::Span<const SpillKey> keys) {
  absl::flat_hash_set<std::string> seen;
  std::vector<SpillChange> changes;
  for (const SpillKey& key : keys) {
    if (seen.insert(EncodeSpillKey(key)).second) changes.push_back({key, "", 0});
  }
  const absl::Status status = core_.Commit({}, changes);
  if (!status.ok()) core_.SetFailure(status);
  return status;
}

absl::Status Validate(const RocksDbSpillOptions& options) {
  const auto bad = [](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("spill: ", what));
  };
  if (options.folder.empty()) return bad("folder is empty");
  if (options.io_threads < 0 || options.io_threads > 64) return bad("io_threads must be 0 to 64");
  if (options.background_jobs < 1 || options.background_jobs > 64) {
    return bad("background_jobs must be 1 to 64");
  }
  if (options.write_buffer_bytes < 64 * kKiB || options.write_buffer_bytes > 64 * kMiB) {
    return bad("write_buffer_bytes must be 64 KiB to 64 MiB");
  }
  if (options.segments_max < 2) return bad("segments_max must be at least 2");
  if (options.segment_bytes < kMiB) return bad("segment_bytes must be at least 1 MiB");
  if (options.quota_bytes != 0 && options.quota_bytes < 16 * kMiB) {
    return bad("quota_bytes must be 0 or at least 16 MiB");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SpillStore>> OpenRocksDbSpillStoreOn(
    const RocksDbSpillOptions& options, std::shared_ptr<rocksdb::FileSystem> file_system) {
  KVT_RETURN_IF_ERROR(Validate(options));
  KVT_RETURN_IF_ERROR(PrepareSpillFolder(options.folder, options.direct_io));
  KVT_ASSIGN_OR_RETURN(auto db, RocksDbSpillDb::Open(options, file_system));
  auto store = std::make_unique<RocksDbSpillStore>(options, std::move(db));
  KVT_RETURN_IF_ERROR(store->Start());
  return store;
}

absl::StatusOr<std::unique_ptr<SpillStore>> OpenRocksDbSpillStore(
    const RocksDbSpillOptions& options) {
  return OpenRocksDbSpillStoreOn(options, nullptr);
}

}  // namespace kvt
