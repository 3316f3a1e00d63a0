// Where records lie in the arena. Offsets only: no memory is touched. Pure; not thread-safe (the
// index owns it).
//
// The arena is cut into slabs of equal size. A slab holds records of one size class, packed from
// its start; an empty slab belongs to no class and may serve any, so several models share an arena.
// BASE and RESIDUAL records are allocated apart. New records go to the lowest slab that has room,
// so that high slabs run empty.
//
//   arena   = slab 0 | slab 1 | ...            capacity = slabs * slab_bytes
//   slab    = record 0 | record 1 | ... | rest
//
// 1. used_bytes() is the sum of the sizes of the records handed out.
// 2. A record is handed out at most once until it is freed.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/statusor.h"

namespace kvt {

class RecordAllocator {
 public:
  using ClassId = uint32_t;

  // Precondition: slab_bytes divides arena_bytes, both greater than zero.
  RecordAllocator(uint64_t arena_bytes, uint64_t slab_bytes);

  // A 64th of the arena in whole 2 MiB pages, between 2 and 64 MiB.
  [[nodiscard]] static uint64_t SlabBytesFor(uint64_t arena_bytes);

  // The class of records of that size, made at first use; digests have classes of their own.
  // FailedPrecondition when such a record does not fit a slab (sizes named), ResourceExhausted
  // beyond kRecordClassesMax.
  absl::StatusOr<ClassId> ClassOf(uint32_t record_bytes, bool digests = false);

  // Nothing when Available(cls) is zero.
  [[nodiscard]] std::optional<uint64_t> TryAllocate(ClassId cls);
  // Precondition: `offset` was allocated and not freed.
  void Free(uint64_t offset);

  // Records that TryAllocate would still give, empty slabs included.
  [[nodiscard]] uint64_t Available(ClassId cls) const;
  // Records that an arena without other classes would hold.
  [[nodiscard]] uint64_t CapacityOf(ClassId cls) const;
  [[nodiscard]] uint32_t RecordBytes(ClassId cls) const { return classes_[cls].record_bytes; }
  [[nodiscard]] uint32_t RecordsPerSlab(ClassId cls) const {
    return classes_[cls].records_per_slab;
  }
  [[nodiscard]] bool IsDigests(ClassId cls) const { return classes_[cls].digests; }
  // Of all classes of digests: slabs that hold records, and those records' bytes.
  [[nodiscard]] uint64_t DigestSlabs() const;
  [[nodiscard]] uint64_t DigestBytes() const;
  // Slabs that hold records of the class; of the arena.
  [[nodiscard]] uint64_t SlabsOf(ClassId cls) const { return classes_[cls].slabs; }
  [[nodiscard]] uint64_t slabs() const { return slabs_.size(); }
  [[nodiscard]] uint32_t SlabOf(uint64_t offset) const {
    return static_cast<uint32_t>(offset / slab_bytes_);
  }
  [[nodiscard]] uint32_t RecordsInSlab(uint32_t slab) const { return slabs_[slab].used; }
  [[nodiscard]] uint64_t used_bytes() const { return used_bytes_; }
  // What no further record can take: used_bytes() and the rest of each slab that holds records, which
  // is much where records are large against a slab.
  [[nodiscard]] uint64_t taken_bytes() const;
  [[nodiscard]] uint64_t capacity_bytes() const { return slabs_.size() * slab_bytes_; }
  [[nodiscard]] uint64_t slab_bytes() const { return slab_bytes_; }

 private:
  struct Class {
    uint32_t record_bytes = 0;
    bool digests = false;
    uint32_t records_per_slab = 0;
    uint64_t used = 0;
    uint64_t slabs = 0;
    std::set<uint32_t> with_room;  // slabs of this class that are not full
  };
  struct Slab {
    std::optional<ClassId> cls;
    uint32_t used = 0;
    uint32_t search_from = 0;     // no free record lies in a word before this one
    std::vector<uint64_t> taken;  // one bit per record
  };

  const uint64_t slab_bytes_;
  std::vector<Slab> slabs_;
  std::set<uint32_t> empty_slabs_;
  std::vector<Class> classes_;
  uint64_t used_bytes_ = 0;
};

}  // namespace kvt
