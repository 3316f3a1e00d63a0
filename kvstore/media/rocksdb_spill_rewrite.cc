// Of SpillCore: room, and the rewriting that makes it.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kvstore/media/rocksdb_spill_core.h"

namespace kvt {
namespace {

// Garbage below this is not worth rewriting for.
constexpr uint64_t kGarbageBytesMin = 64 * kMiB;
// Of the smallest that become one.
constexpr uint64_t kMergeMax = 32;
// Of one call of Tidy: what it may cost the write that brought it.
constexpr int kTidyRounds = 2;

}  // namespace

bool SpillCore::Fits(uint64_t bytes, uint64_t entry_bytes, uint64_t free_bytes) const {
  const uint64_t wanted = reserved_ + bytes;
  if (wanted + options_.free_bytes_min > free_bytes) return false;
  if (options_.quota_bytes == 0) return true;
  return figures_.segments.disk_bytes() + entry_bytes + wanted + segment_bytes_ <=
         options_.quota_bytes;
}

uint64_t SpillCore::RewriteMax(uint64_t entry_bytes, uint64_t free_bytes) const {
  uint64_t room = free_bytes - std::min(free_bytes, reserved_);
  if (options_.quota_bytes != 0) {
    const uint64_t used = figures_.segments.disk_bytes() + entry_bytes + reserved_;
    room = std::min(room, options_.quota_bytes - std::min(options_.quota_bytes, used));
  }
  return room;
}

absl::Status SpillCore::Reserve(uint64_t bytes) {
  uint64_t garbage = ~uint64_t{0};
  for (;;) {
    const uint64_t entry_bytes = db_.EntryDiskBytes();
    const uint64_t free_bytes = db_.FreeBytes();
    {
      MutexLock lock(mu_);
      if (Fits(bytes, entry_bytes, free_bytes)) {
        reserved_ += bytes;
        return absl::OkStatus();
      }
      const SpillSegment* victim = figures_.segments.Worst(RewriteMax(entry_bytes, free_bytes));
      // Each round takes garbage away, or it is the last.
      if (victim == nullptr || figures_.segments.garbage_bytes() >= garbage) {
        const bool disk = reserved_ + bytes + options_.free_bytes_min > free_bytes;
        return absl::ResourceExhaustedError(absl::StrCat(
            "spill folder ", options_.folder, ": no room for ", FormatBytes(bytes), ": ",
            disk ? absl::StrCat(FormatBytes(free_bytes), " free on the disk, of which ",
                                FormatBytes(options_.free_bytes_min), " stay free")
                 : absl::StrCat(FormatBytes(figures_.segments.disk_bytes() + entry_bytes),
                                " of the quota of ", FormatBytes(options_.quota_bytes),
                                " in use, of which ", FormatBytes(segment_bytes_),
                                " are for rewriting")));
      }
      garbage = figures_.segments.garbage_bytes();
    }
    const Turn turn(*this, rewriting_);
    std::vector<SpillSegment> victims;
    {
      MutexLock lock(mu_);
      const SpillSegment* victim = figures_.segments.Worst(RewriteMax(entry_bytes, free_bytes));
      if (victim != nullptr) victims.push_back(*victim);
    }
    KVT_RETURN_IF_ERROR(Rewrite(victims));
  }
}

std::vector<SpillSegment> SpillCore::TidyVictims() const {
  const uint64_t entry_bytes = db_.EntryDiskBytes();
  const uint64_t free_bytes = db_.FreeBytes();
  MutexLock lock(mu_);
  const uint64_t room = RewriteMax(entry_bytes, free_bytes);
  if (figures_.segments.garbage_bytes() >
      std::max(kGarbageBytesMin, figures_.segments.live_bytes() / 3)) {
    const SpillSegment* worst = figures_.segments.Worst(room);
    if (worst != nullptr) return {*worst};
  }
  if (figures_.segments.count() > options_.segments_max) {
    std::vector<SpillSegment> small =
        figures_.segments.Smallest(kMergeMax, std::min(room, segment_bytes_));
    if (small.size() > 1) return small;
  }
  return {};
}

void SpillCore::Tidy() {
  if (TidyVictims().empty()) return;
  {
    MutexLock lock(mu_);
    if (rewriting_) return;  // somebody is at it
  }
  const Turn turn(*this, rewriting_);
  for (int round = 0; round < kTidyRounds; ++round) {
    const std::vector<SpillSegment> victims = TidyVictims();
    if (victims.empty()) return;
    const absl::Status status = Rewrite(victims);
    if (!status.ok()) {
      KVT_LOG(kWarning, "spill: rewriting failed, garbage stays: ", status.message());
      return;
    }
  }
}

absl::Status SpillCore::Reclaim() {
  const Turn turn(*this, rewriting_);
  std::vector<SpillSegment> all;
  {
    MutexLock lock(mu_);
    all = figures_.segments.WithGarbage();
  }
  for (const SpillSegment& segment : all) KVT_RETURN_IF_ERROR(Rewrite({&segment, 1}));
  KVT_RETURN_IF_ERROR(DropDead());
  return db_.PurgeEntries();
}

absl::StatusOr<std::vector<SpillCore::Live>> SpillCore::LiveOf(const SpillSegment& segment) const {
  absl::StatusOr<std::vector<SpillKey>> keys = absl::DataLossError("");
  const absl::Status read = db_.ReadRecord(segment.last, [&](absl::string_view bytes) {
    keys = DecodeSpillContents(segment.first, bytes);
    return absl::OkStatus();
  });
  std::vector<Live> live;
  if (!keys.ok()) {
    if (!read.ok() && !absl::IsDataLoss(read) && !absl::IsNotFound(read)) return read;
    // Its contents are damaged: the entries know.
    KVT_RETURN_IF_ERROR(db_.ScanEntries([&](absl::string_view key_bytes, absl::string_view value) {
      SpillKey key;
      if (!DecodeSpillKey(key_bytes, &key)) return true;
      const absl::StatusOr<SpillEntry> entry = DecodeSpillEntry(key, value);
      if (entry.ok() && entry->sequence >= segment.first && entry->sequence < segment.last) {
        live.push_back({key, entry->sequence});
      }
      return true;
    }));
    return live;
  }
  const std::vector<absl::StatusOr<Found>> found = Lookup(*keys);
  for (size_t i = 0; i < keys->size(); ++i) {
    if (!found[i].ok() && absl::IsUnavailable(found[i].status())) return found[i].status();
    if (found[i].ok() && found[i]->sequence == segment.first + i) {
      live.push_back({(*keys)[i], found[i]->sequence});
    }
  }
  return live;
}

absl::Status SpillCore::Rewrite(absl::Span<const SpillSegment> victims) {
  std::vector<Live> live;
  for (const SpillSegment& victim : victims) {
    KVT_ASSIGN_OR_RETURN(const std::vector<Live> some, LiveOf(victim));
    live.insert(live.end(), some.begin(), some.end());
  }
  for (size_t at = 0; at < live.size();) {
    size_t taken = 0;
    KVT_RETURN_IF_ERROR(MoveSome(absl::MakeConstSpan(live).subspan(at), &taken));
    at += taken;
  }
  return DropDead();
}

// Moves the first of `live` into one new segment.
absl::Status SpillCore::MoveSome(absl::Span<const Live> live, size_t* taken) {
  const uint64_t first = TakeSequences(live.size() + 1);
  const auto writer = db_.NewWriter(first);
  KVT_RETURN_IF_ERROR(writer->Open());
  std::vector<SpillKey> keys;
  std::vector<SpillChange> changes;
  uint64_t written = 0;
  for (*taken = 0; *taken < live.size() && written < segment_bytes_; ++*taken) {
    const Live& record = live[*taken];
    const std::string key = EncodeSpillKey(record.key);
    const absl::StatusOr<std::string> old = db_.GetEntries({&key, 1})[0];
    if (!old.ok() && absl::IsUnavailable(old.status())) return old.status();
    absl::StatusOr<SpillEntry> entry = absl::NotFoundError("");
    if (old.ok()) entry = DecodeSpillEntry(record.key, *old);
    if (!entry.ok() || entry->sequence != record.sequence) continue;  // erased or replaced since
    absl::Status added;
    const absl::Status read = db_.ReadRecord(record.sequence, [&](absl::string_view bytes) {
      if (bytes.size() != entry->bytes ||
          SpillRecordChecksum(record.key, bytes.data(), bytes.size()) != entry->checksum) {
        return absl::DataLossError("damaged");
      }
      added = writer->Add(first + keys.size(), bytes.data(), bytes.size());
      return absl::OkStatus();
    });
    KVT_RETURN_IF_ERROR(added);
    if (absl::IsDataLoss(read) || absl::IsNotFound(read)) {
      changes.push_back({record.key, "", record.sequence});  // damaged
      continue;
    }
    KVT_RETURN_IF_ERROR(read);
    entry->sequence = first + keys.size();
    changes.push_back({record.key, EncodeSpillEntry(record.key, *entry), record.sequence});
    keys.push_back(record.key);
    written += entry->bytes;
  }
  if (keys.empty()) return Commit({}, changes);
  const std::string contents = EncodeSpillContents(first, keys);
  KVT_RETURN_IF_ERROR(writer->Add(first + keys.size(), contents.data(), contents.size()));
  KVT_ASSIGN_OR_RETURN(const uint64_t disk_bytes, writer->Finish());
  const NewSegment segment{first, first + keys.size(), disk_bytes, writer->path()};
  return Commit({&segment, 1}, changes);
}

}  // namespace kvt
