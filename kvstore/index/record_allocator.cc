#include "kvstore/index/record_allocator.h"

#include <algorithm>
#include <bit>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"
#include "kvstore/index/limits.h"

namespace kvt {

RecordAllocator::RecordAllocator(uint64_t arena_bytes, uint64_t slab_bytes)
    : slab_bytes_(slab_bytes) {
  KVT_CHECK(slab_bytes > 0 && arena_bytes > 0 && arena_bytes % slab_bytes == 0, "arena ",
            arena_bytes, " slab ", slab_bytes);
  const uint64_t slabs = arena_bytes / slab_bytes;
  KVT_CHECK(slabs <= UINT32_MAX, "slabs ", slabs);
  slabs_.resize(slabs);
  for (uint32_t slab = 0; slab < slabs; ++slab) empty_slabs_.insert(empty_slabs_.end(), slab);
}

uint64_t RecordAllocator::SlabBytesFor(uint64_t arena_bytes) {
  return std::clamp(RoundUp(arena_bytes / 64, 2 * kMiB), 2 * kMiB, 64 * kMiB);
}

absl::StatusOr<RecordAllocator::ClassId> RecordAllocator::ClassOf(uint32_t record_bytes,
                                                                bool digests) {
  for (ClassId cls = 0; cls < classes_.size(); ++cls) {
    if (classes_[cls].record_bytes == record_bytes && classes_[cls].digests == digests) return cls;
  }
  if (record_bytes == 0 || record_bytes > slab_bytes_) {
    return absl::FailedPreconditionError(absl::StrCat("a record of ", FormatBytes(record_bytes),
                                                      " does not fit this store's slabs of ",
                                                      FormatBytes(slab_bytes_)));
  }
  if (classes_.size() == kRecordClassesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this store has seen ", kRecordClassesMax, " record sizes already"));
  }
  Class cls;
  cls.record_bytes = record_bytes;
  cls.digests = digests;
  cls.records_per_slab = static_cast<uint32_t>(slab_bytes_ / record_bytes);
  classes_.push_back(std::move(cls));
  return static_cast<ClassId>(classes_.size() - 1);
}

std::optional<uint64_t> RecordAllocator::TryAllocate(ClassId id) {
  Class& cls = classes_[id];
  if (cls.with_room.empty()) {
    if (empty_slabs_.empty()) return std::nullopt;
    const uint32_t fresh = *empty_slabs_.begin();
    empty_slabs_.erase(empty_slabs_.begin());
    Slab& slab = slabs_[fresh];
    slab.cls = id;
    slab.search_from = 0;
    slab.taken.assign(CeilDiv(cls.records_per_slab, 64), 0);
    cls.with_room.insert(fresh);
    ++cls.slabs;
  }
  const uint32_t number = *cls.with_room.begin();
  Slab& slab = slabs_[number];
  uint32_t word = slab.search_from;
  while (slab.taken[word] == ~uint64_t{0}) ++word;
  slab.search_from = word;
  const uint32_t record = word * 64 + static_cast<uint32_t>(std::countr_one(slab.taken[word]));
  KVT_CHECK(record < cls.records_per_slab, "slab ", number, " is full");
  slab.taken[word] |= uint64_t{1} << (record % 64);
  ++slab.used;
  ++cls.used;
  used_bytes_ += cls.record_bytes;
  if (slab.used == cls.records_per_slab) cls.with_room.erase(number);
  return number * slab_bytes_ + uint64_t{record} * cls.record_bytes;
}

void RecordAllocator::Free(uint64_t offset) {
  const uint32_t number = SlabOf(offset);
  KVT_CHECK(number < slabs_.size() && slabs_[number].cls.has_value(), "offset ", offset);
  Slab& slab = slabs_[number];
  Class& cls = classes_[*slab.cls];
  const uint64_t within = offset % slab_bytes_;
  const auto record = static_cast<uint32_t>(within / cls.record_bytes);
  const uint64_t bit = uint64_t{1} << (record % 64);
  KVT_CHECK(within % cls.record_bytes == 0 && record < cls.records_per_slab &&
                (slab.taken[record / 64] & bit) != 0,
            "offset ", offset, " is no record");
  if (slab.used == cls.records_per_slab) cls.with_room.insert(number);
  slab.taken[record / 64] &= ~bit;
  slab.search_from = std::min(slab.search_from, record / 64);
  --slab.used;
  --cls.used;
  used_bytes_ -= cls.record_bytes;
  if (slab.used == 0) {
    cls.with_room.erase(number);
    --cls.slabs;
    slab.cls.reset();
    empty_slabs_.insert(number);
  }
}

uint64_t RecordAllocator::Available(ClassId id) const {
  const Class& cls = classes_[id];
  return (cls.slabs + empty_slabs_.size()) * cls.records_per_slab - cls.used;
}

uint64_t RecordAllocator::DigestSlabs() const {
  uint64_t slabs = 0;
  for (const Class& cls : classes_) slabs += cls.digests ? cls.slabs : 0;
  return slabs;
}

uint64_t RecordAllocator::DigestBytes() const {
  uint64_t bytes = 0;
  for (const Class& cls : classes_) bytes += cls.digests ? cls.used * cls.record_bytes : 0;
  return bytes;
}

uint64_t RecordAllocator::taken_bytes() const {
  uint64_t room = empty_slabs_.size() * slab_bytes_;
  for (const Class& cls : classes_) {
    room += (cls.slabs * cls.records_per_slab - cls.used) * cls.record_bytes;
  }
  return capacity_bytes() - room;
}

uint64_t RecordAllocator::CapacityOf(ClassId id) const {
  return slabs_.size() * classes_[id].records_per_slab;
}

}  // namespace kvt
