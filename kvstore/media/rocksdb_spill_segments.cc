#include "kvstore/media/rocksdb_spill_segments.h"

#include <algorithm>

#include "kernels/base/check.h"

namespace kvt {

const SpillSegment* SpillSegments::Find(uint64_t sequence) const {
  auto it = segments_.upper_bound(sequence);
  if (it == segments_.begin()) return nullptr;
  const SpillSegment& segment = std::prev(it)->second;
  return sequence < segment.last ? &segment : nullptr;
}

void SpillSegments::Add(uint64_t first, uint64_t last, uint64_t disk_bytes) {
  KVT_CHECK(first < last, first, " ", last);
  SpillSegment segment;
  segment.first = first;
  segment.last = last;
  segment.disk_bytes = disk_bytes;
  KVT_CHECK(segments_.emplace(first, segment).second, "segment ", first, " twice");
  disk_bytes_ += disk_bytes;
}

void SpillSegments::Commit(uint64_t first) {
  const auto it = segments_.find(first);
  KVT_CHECK(it != segments_.end() && !it->second.committed, "segment ", first);
  it->second.committed = true;
  garbage_bytes_ += it->second.GarbageBytes();
}

void SpillSegments::Remove(uint64_t first) {
  const auto it = segments_.find(first);
  KVT_CHECK(it != segments_.end(), "segment ", first);
  disk_bytes_ -= it->second.disk_bytes;
  live_bytes_ -= it->second.live_bytes;
  if (it->second.committed) garbage_bytes_ -= it->second.GarbageBytes();
  segments_.erase(it);
}

void SpillSegments::AddLive(uint64_t sequence, uint64_t bytes) {
  SpillSegment* segment = Find(sequence);
  KVT_CHECK(segment != nullptr && segment->live_records < segment->Records(), sequence);
  if (segment->committed) garbage_bytes_ -= segment->GarbageBytes();
  segment->live_bytes += bytes;
  ++segment->live_records;
  live_bytes_ += bytes;
  if (segment->committed) garbage_bytes_ += segment->GarbageBytes();
}

void SpillSegments::SubLive(uint64_t sequence, uint64_t bytes) {
  SpillSegment* segment = Find(sequence);
  KVT_CHECK(segment != nullptr && segment->live_records > 0 && segment->live_bytes >= bytes,
            sequence);
  if (segment->committed) garbage_bytes_ -= segment->GarbageBytes();
  segment->live_bytes -= bytes;
  --segment->live_records;
  live_bytes_ -= bytes;
  if (segment->committed) garbage_bytes_ += segment->GarbageBytes();
}

std::vector<SpillSegment> SpillSegments::BeingWritten() const {
  std::vector<SpillSegment> found;
  for (const auto& [first, segment] : segments_) {
    if (!segment.committed) found.push_back(segment);
  }
  return found;
}

std::vector<SpillSegment> SpillSegments::Dead() const {
  std::vector<SpillSegment> dead;
  for (const auto& [first, segment] : segments_) {
    if (segment.committed && segment.live_records == 0) dead.push_back(segment);
  }
  return dead;
}

std::vector<SpillSegment> SpillSegments::WithGarbage() const {
  std::vector<SpillSegment> found;
  for (const auto& [first, segment] : segments_) {
    if (segment.committed && segment.GarbageBytes() > 0) found.push_back(segment);
  }
  return found;
}

const SpillSegment* SpillSegments::Worst(uint64_t live_bytes_max) const {
  const SpillSegment* worst = nullptr;
  double most = 0;
  for (const auto& [first, segment] : segments_) {
    if (!segment.committed || segment.live_bytes > live_bytes_max) continue;
    const double gain =
        static_cast<double>(segment.GarbageBytes()) / static_cast<double>(segment.live_bytes + 1);
    if (gain > most) {
      most = gain;
      worst = &segment;
    }
  }
  return worst;
}

std::vector<SpillSegment> SpillSegments::Smallest(uint64_t count, uint64_t bytes) const {
  std::vector<SpillSegment> all;
  for (const auto& [first, segment] : segments_) {
    if (segment.committed) all.push_back(segment);
  }
  std::sort(all.begin(), all.end(), [](const SpillSegment& a, const SpillSegment& b) {
    return a.disk_bytes < b.disk_bytes;
  });
  uint64_t sum = 0;
  size_t taken = 0;
  while (taken < all.size() && taken < count && sum + all[taken].disk_bytes <= bytes) {
    sum += all[taken++].disk_bytes;
  }
  all.resize(taken);
  return all;
}

}  // namespace kvt
