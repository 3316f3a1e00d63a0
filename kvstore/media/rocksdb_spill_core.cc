#include "kvstore/media/rocksdb_spill_core.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

constexpr absl::Duration kRecheck = absl::Seconds(5);
constexpr uint64_t kEraseBatch = 4096;

uint64_t SegmentBytesOf(const RocksDbSpillOptions& options) {
  if (options.quota_bytes == 0) return options.segment_bytes;
  return std::min(options.segment_bytes, options.quota_bytes / 8);
}

absl::StatusOr<SpillCore::Found> FoundOf(const SpillKey& key, absl::string_view entry) {
  KVT_ASSIGN_OR_RETURN(const SpillEntry decoded, DecodeSpillEntry(key, entry));
  return SpillCore::Found{decoded.sequence, decoded.bytes, decoded.checksum};
}

}  // namespace

SpillCore::SpillCore(const RocksDbSpillOptions& options, RocksDbSpillDb& db)
    : options_(options), db_(db), segment_bytes_(SegmentBytesOf(options)) {}

SpillCore::Turn::Turn(SpillCore& core, bool& flag) : core_(core), flag_(flag) {
  MutexLock lock(core_.mu_);
  while (flag_) (void)core_.changed_.WaitFor(core_.mu_, kRecheck);
  flag_ = true;
}

SpillCore::Turn::~Turn() {
  MutexLock lock(core_.mu_);
  flag_ = false;
  core_.changed_.NotifyAll();
}

// ---- opening and scanning ----

absl::Status SpillCore::Recover() {
  {
    const Turn turn(*this, committing_);
    KVT_RETURN_IF_ERROR(Recount());
  }
  return DropDead();
}

absl::Status SpillCore::Recount() {
  const Turn turn(*this, dropping_);
  const uint64_t generation = db_.generation();
  KVT_ASSIGN_OR_RETURN(const std::vector<SpillSegment> listed, db_.ListSegments());
  Figures fresh;
  uint64_t last = 0;
  for (const SpillSegment& segment : listed) {
    fresh.segments.Add(segment.first, segment.last, segment.disk_bytes);
    last = std::max(last, segment.last);
  }
  std::vector<std::string> bad;
  KVT_RETURN_IF_ERROR(db_.ScanEntries([&](absl::string_view key_bytes, absl::string_view value) {
    SpillKey key;
    absl::StatusOr<SpillEntry> entry = absl::DataLossError("no key");
    if (DecodeSpillKey(key_bytes, &key)) entry = DecodeSpillEntry(key, value);
    if (!entry.ok() || !fresh.segments.Contains(entry->sequence)) {
      bad.emplace_back(key_bytes);
    } else {
      fresh.Replace(key, "", value);
    }
    return true;
  }));
  for (size_t at = 0; at < bad.size(); at += kEraseBatch) {
    rocksdb::WriteBatch batch;
    for (size_t i = at; i < std::min<size_t>(bad.size(), at + kEraseBatch); ++i)
      batch.Delete(bad[i]);
    KVT_RETURN_IF_ERROR(db_.WriteEntries(&batch));
  }
  MutexLock lock(mu_);
  // Segments that others are writing have no entries yet.
  absl::flat_hash_set<uint64_t> writing;
  for (const SpillSegment& segment : figures_.segments.BeingWritten()) {
    writing.insert(segment.first);
    if (!fresh.segments.IsThere(segment.first)) {
      fresh.segments.Add(segment.first, segment.last, segment.disk_bytes);
    }
  }
  for (const SpillSegment& segment : listed) {
    if (!writing.contains(segment.first)) fresh.segments.Commit(segment.first);
  }
  figures_ = std::move(fresh);
  next_sequence_ = std::max(next_sequence_, last + 1);
  counted_generation_ = generation;
  return absl::OkStatus();
}

absl::Status SpillCore::Scan(const SpillVisitor& visit) {
  std::vector<SpillChange> bad;
  const absl::Status scanned =
      db_.ScanEntries([&](absl::string_view key_bytes, absl::string_view value) {
        SpillKey key;
        if (!DecodeSpillKey(key_bytes, &key)) return true;  // erased at the next open
        const absl::StatusOr<SpillEntry> entry = DecodeSpillEntry(key, value);
        if (!entry.ok()) {
          bad.push_back({key, "", 0});
          return true;
        }
        return visit(key, entry->meta, entry->bytes);
      });
  KVT_RETURN_IF_ERROR(scanned);
  return bad.empty() ? absl::OkStatus() : Commit({}, bad);
}

std::vector<absl::StatusOr<SpillCore::Found>> SpillCore::Lookup(
    absl::Span<const SpillKey> keys) const {
  std::vector<std::string> encoded;
  encoded.reserve(keys.size());
  for (const SpillKey& key : keys) encoded.push_back(EncodeSpillKey(key));
  const std::vector<absl::StatusOr<std::string>> entries = db_.GetEntries(encoded);
  std::vector<absl::StatusOr<Found>> found;
  found.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    if (entries[i].ok()) {
      found.push_back(FoundOf(keys[i], *entries[i]));
    } else {
      found.emplace_back(entries[i].status());
    }
  }
  return found;
}

// ---- changing ----

uint64_t SpillCore::TakeSequences(uint64_t count) {
  MutexLock lock(mu_);
  return std::exchange(next_sequence_, next_sequence_ + count);
}

void SpillCore::Figures::Replace(const SpillKey& key, absl::string_view old_entry,
                                 absl::string_view new_entry) {
  if (!old_entry.empty()) {
    const absl::StatusOr<SpillEntry> entry = DecodeSpillEntry(key, old_entry);
    // One that is damaged or names no segment was not counted.
    if (entry.ok() && segments.Contains(entry->sequence)) {
      segments.SubLive(entry->sequence, entry->bytes);
      --records;
      entry_bytes -= kSpillKeyBytes + old_entry.size();
    }
  }
  if (!new_entry.empty()) {
    const absl::StatusOr<SpillEntry> entry = DecodeSpillEntry(key, new_entry);
    KVT_CHECK(entry.ok(), entry.status().ToString());
    segments.AddLive(entry->sequence, entry->bytes);
    ++records;
    entry_bytes += kSpillKeyBytes + new_entry.size();
  }
}

absl::Status SpillCore::Commit(absl::Span<const NewSegment> segments,
                               absl::Span<const SpillChange> changes) {
  if (!segments.empty()) {
    std::vector<std::string> paths;
    {
      MutexLock lock(mu_);
      for (const NewSegment& segment : segments) {
        figures_.segments.Add(segment.first, segment.last, segment.disk_bytes);
        paths.push_back(segment.path);
      }
    }
    const absl::Status taken = db_.Ingest(paths);
    // Whether they are in is not known then: they are dead, and dropped if they are.
    if (!taken.ok()) {
      MutexLock lock(mu_);
      for (const NewSegment& segment : segments) figures_.segments.Commit(segment.first);
      return taken;
    }
  }
  const absl::Status status = CommitEntries(changes, segments);
  (void)DropDead();  // what could not be dropped is tried again by the next one
  return status;
}

absl::Status SpillCore::CommitEntries(absl::Span<const SpillChange> changes,
                                      absl::Span<const NewSegment> segments) {
  const Turn turn(*this, committing_);
  {
    mu_.Lock();
    const bool stale = counted_generation_ != db_.generation();
    mu_.Unlock();
    const absl::Status counted = stale ? Recount() : absl::OkStatus();
    if (!counted.ok()) {
      MutexLock lock(mu_);
      for (const NewSegment& segment : segments) figures_.segments.Commit(segment.first);
      return counted;
    }
  }
  std::vector<std::string> keys;
  keys.reserve(changes.size());
  for (const SpillChange& change : changes) keys.push_back(EncodeSpillKey(change.key));
  const std::vector<absl::StatusOr<std::string>> old = db_.GetEntries(keys);
  rocksdb::WriteBatch batch;
  std::vector<bool> made(changes.size());
  absl::Status status;
  for (size_t i = 0; i < changes.size(); ++i) {
    if (!old[i].ok() && absl::IsUnavailable(old[i].status())) status = old[i].status();
    if (changes[i].only_if != 0) {
      if (!old[i].ok()) continue;
      const absl::StatusOr<Found> now = FoundOf(changes[i].key, *old[i]);
      if (!now.ok() || now->sequence != changes[i].only_if) continue;
    }
    if (changes[i].entry.empty() && absl::IsNotFound(old[i].status())) continue;
    made[i] = true;
    if (changes[i].entry.empty()) {
      batch.Delete(keys[i]);
    } else {
      batch.Put(keys[i], changes[i].entry);
    }
  }
  if (status.ok() && batch.Count() > 0) status = db_.WriteEntries(&batch);
  bool stale = false;
  {
    MutexLock lock(mu_);
    if (status.ok()) {
      for (size_t i = 0; i < changes.size(); ++i) {
        if (!made[i]) continue;
        figures_.Replace(changes[i].key, old[i].ok() ? *old[i] : "", changes[i].entry);
      }
    }
    // Without entries they are dead, and dropped.
    for (const NewSegment& segment : segments) figures_.segments.Commit(segment.first);
    stale = counted_generation_ != db_.generation();
  }
  // On an error here the next one counts.
  if (stale) (void)Recount();
  return status;
}

absl::Status SpillCore::EraseIf(const SpillKey& key, uint64_t sequence) {
  const SpillChange change{key, "", sequence};
  return Commit({}, {&change, 1});
}

absl::Status SpillCore::DropDead() {
  {
    MutexLock lock(mu_);
    if (figures_.segments.Dead().empty()) return absl::OkStatus();
  }
  const Turn turn(*this, dropping_);
  std::vector<SpillSegment> dead;
  {
    MutexLock lock(mu_);
    dead = figures_.segments.Dead();
  }
  KVT_RETURN_IF_ERROR(db_.DropSegments(dead));
  MutexLock lock(mu_);
  for (const SpillSegment& segment : dead) figures_.segments.Remove(segment.first);
  return absl::OkStatus();
}

// ---- figures ----

SpillUsage SpillCore::Usage() const {
  const uint64_t entry_disk_bytes = db_.EntryDiskBytes();
  SpillUsage usage;
  usage.free_bytes = db_.FreeBytes();
  MutexLock lock(mu_);
  usage.records = figures_.records;
  usage.live_bytes = figures_.segments.live_bytes() + figures_.entry_bytes;
  usage.disk_bytes = figures_.segments.disk_bytes() + entry_disk_bytes;
  usage.quota_bytes = options_.quota_bytes;
  usage.failing = !failure_.ok();
  usage.failure = failure_;
  return usage;
}

void SpillCore::SetFailure(absl::Status failure) {
  MutexLock lock(mu_);
  failure_ = std::move(failure);
}

void SpillCore::Unreserve(uint64_t bytes) {
  MutexLock lock(mu_);
  reserved_ -= bytes;
}

}  // namespace kvt
