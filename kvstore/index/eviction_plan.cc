#include "kvstore/index/eviction_plan.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "kernels/base/units.h"
#include "kvstore/index/limits.h"

namespace kvt {

uint64_t DigestExcess(uint64_t digest_bytes, uint64_t limit) {
  const uint64_t share = limit / kDigestSharePart;
  return limit == 0 || digest_bytes <= share ? 0 : digest_bytes - share;
}

bool MayLeave(const Block& block, Plane plane) {
  const auto p = static_cast<size_t>(plane);
  if (block.offset[p] == kNoOffset || block.moving[p] != Moving::kNone || block.in_flight[p] > 0) {
    return false;
  }
  if (block.on_disk[p]) return true;
  if (block.IsHeld()) return false;
  // A BASE takes its block with it, all of whose memory must be free then.
  return plane == Plane::kResidual || !block.IsBusy();
}

namespace {

class Planner {
 public:
  Planner(const BlockTable& table, const EvictionOrder& order, const RecordAllocator& allocator,
          const RoomNeed& need, const EvictionRules& rules)
      : table_(table),
        order_(order),
        allocator_(allocator),
        need_(need),
        rules_(rules),
        digests_(allocator.IsDigests(need.cls)),
        planes_apart_(rules.planes_apart && !digests_),
        digest_share_(std::max<uint64_t>(1, allocator.slabs() / kDigestSharePart)),
        records_(allocator.Available(need.cls)),
        numbers_(table.NumbersLeft()) {}

  std::optional<EvictionSet> Plan() {
    if (need_.records > allocator_.CapacityOf(need_.cls)) return std::nullopt;
    if (RecordsEnough() && NumbersEnough()) return EvictionSet();
    if (!RecordsEnough() && rules_.floors) FromExcessDigests();
    if (!RecordsEnough() && rules_.floors) UpToFloor();
    if (!RecordsEnough()) FromOrder(/*all=*/false);
    if (!RecordsEnough() && !rules_.spare_unspilled) FromOrder(/*all=*/true);
    if (!RecordsEnough()) FromPinned();
    if (!RecordsEnough() && !FromOtherSlabs(Whose(SlabsNeeded()), SlabsNeeded(), 0)) {
      return std::nullopt;
    }
    if (!NumbersEnough()) WholeBlocks();
    if (!NumbersEnough()) return std::nullopt;
    return std::move(set_);
  }

 private:
  [[nodiscard]] bool RecordsEnough() const { return records_ >= need_.records; }
  [[nodiscard]] bool NumbersEnough() const { return numbers_ >= need_.blocks; }
  [[nodiscard]] uint64_t RecordOf(uint32_t number, Plane plane) const {
    return PlaneRecordHandle(table_.HandleOf(number), plane);
  }

  void Take(uint32_t number, Plane plane) {
    if (!chosen_.insert(RecordOf(number, plane)).second) return;
    const Block& block = table_.At(number);
    if (block.cls == need_.cls) ++records_;
    if (plane == Plane::kBase && !block.OnDisk(plane)) {
      // Its RESIDUAL first: the block goes with its BASE.
      if (block.InMemory(Plane::kResidual)) Take(number, Plane::kResidual);
      ++numbers_;
      dying_.insert(number);
    }
    set_.records.push_back(RecordOf(number, plane));
  }

  // One list, from the cold end; `all`: also what deserves the disk and is not there.
  void FromList(Plane plane, ListKind kind, bool all) {
    uint64_t skipped = 0;
    order_.Walk(need_.cls, plane, kind, [&](uint32_t number) {
      const Block& block = table_.At(number);
      const bool cheap = all || block.OnDisk(plane) || !DeservesDisk(block, rules_);
      if (!cheap || !MayLeave(block, plane)) return ++skipped < kEvictionSkipsMax || all;
      if (!planes_apart_ && MayLeave(block, Plane::kResidual)) {
        Take(number, Plane::kResidual);
      }
      Take(number, plane);
      return !RecordsEnough();
    });
  }
  void FromOrder(bool all) {
    for (const ListKind kind : {ListKind::kOnce, ListKind::kAgain}) {
      if (planes_apart_ && !RecordsEnough()) FromList(Plane::kResidual, kind, all);
      if (!RecordsEnough()) FromList(Plane::kBase, kind, all);
    }
    // BASE on disk, RESIDUAL in memory.
    for (const ListKind kind : {ListKind::kOnce, ListKind::kAgain}) {
      if (!RecordsEnough()) FromList(Plane::kResidual, kind, all);
    }
  }
  void FromPinned() {
    for (const Plane plane : {Plane::kResidual, Plane::kBase}) {
      if (RecordsEnough() || (plane == Plane::kBase && !need_.pinned_base)) return;
      order_.Walk(need_.cls, plane, ListKind::kHeld, [&](uint32_t number) {
        const Block& block = table_.At(number);
        if (block.OnDisk(plane) && block.hold_until <= rules_.now && MayLeave(block, plane)) {
          Take(number, plane);
        }
        return !RecordsEnough();
      });
    }
  }

  enum class Others { kAll, kKv, kDigests };

  // Every record of those other classes that may leave, coldest first, KV before digests.
  template <typename Visit>
  void ForEachOther(Others others, Visit visit) const {
    uint64_t position = 0;
    if (others != Others::kDigests) ForEachOther(false, position, visit);
    if (others != Others::kKv) ForEachOther(true, position, visit);
  }
  template <typename Visit>
  void ForEachOther(bool digests, uint64_t& position, Visit visit) const {
    for (uint32_t cls = 0; cls < order_.classes(); ++cls) {
      if (cls == need_.cls || allocator_.IsDigests(cls) != digests) continue;
      for (const ListKind kind : {ListKind::kOnce, ListKind::kAgain}) {
        for (const Plane plane : {Plane::kResidual, Plane::kBase}) {
          order_.Walk(cls, plane, kind, [&](uint32_t number) {
            ++position;
            const Block& block = table_.At(number);
            const bool spared = rules_.spare_unspilled && !block.OnDisk(plane) &&
                                DeservesDisk(block, rules_);
            if (!spared && MayLeave(block, plane)) {
              visit(allocator_.SlabOf(block.offset[static_cast<size_t>(plane)]), number, plane,
                    position);
            }
            return true;
          });
        }
      }
    }
  }
  [[nodiscard]] uint64_t SlabsNeeded() const {
    return CeilDiv(need_.records - records_, allocator_.RecordsPerSlab(need_.cls));
  }
  // Digests take slabs of KV up to their share only.
  [[nodiscard]] Others Whose(uint64_t slabs) const {
    return digests_ && allocator_.DigestSlabs() + slabs > digest_share_ ? Others::kDigests
                                                                        : Others::kAll;
  }
  void FromExcessDigests() {
    const uint64_t slabs = allocator_.DigestSlabs();
    if (digests_ || slabs <= digest_share_) return;
    set_.floor_missed =
        !FromOtherSlabs(Others::kDigests, std::min(SlabsNeeded(), slabs - digest_share_), 1);
  }
  void UpToFloor() {
    const uint64_t floor = std::max<uint64_t>(1, allocator_.slabs() / kClassFloorPart);
    const uint64_t has = allocator_.SlabsOf(need_.cls);
    const uint64_t digest_slabs = allocator_.DigestSlabs();
    if (digests_ && digest_slabs < digest_share_) {
      const uint64_t slabs = std::min(SlabsNeeded(), digest_share_ - digest_slabs);
      set_.floor_missed = !FromOtherSlabs(Others::kKv, slabs, floor);
    } else if (has < floor) {
      const uint64_t slabs = std::min(SlabsNeeded(), floor - has);
      set_.floor_missed |=
          !FromOtherSlabs(digests_ ? Others::kDigests : Others::kAll, slabs, floor);
    }
  }
  // Empties so many slabs of classes that keep more than `floor` of them. False: there are not so
  // many; then it empties those there are, or with no floor none.
  bool FromOtherSlabs(Others others, uint64_t slabs, uint64_t floor) {
    struct SlabUse {
      uint32_t evictable = 0;
      uint32_t cls = 0;
      uint64_t warmth = 0;
    };
    absl::flat_hash_map<uint32_t, SlabUse> uses;
    ForEachOther(others, [&](uint32_t slab, uint32_t number, Plane, uint64_t position) {
      SlabUse& use = uses[slab];
      ++use.evictable;
      use.cls = table_.At(number).cls;
      use.warmth = position;
    });
    std::vector<std::pair<uint64_t, uint32_t>> emptied;  // warmth, slab
    for (const auto& [slab, use] : uses) {
      if (use.evictable == allocator_.RecordsInSlab(slab)) emptied.emplace_back(use.warmth, slab);
    }
    std::sort(emptied.begin(), emptied.end());
    absl::flat_hash_map<uint32_t, uint64_t> given = given_;
    absl::flat_hash_set<uint32_t> taken;
    for (const auto& [warmth, slab] : emptied) {
      if (taken.size() == slabs) break;
      const uint32_t cls = uses[slab].cls;
      if (taken_slabs_.contains(slab) || allocator_.SlabsOf(cls) - given[cls] <= floor) continue;
      ++given[cls];
      taken.insert(slab);
    }
    const bool enough = taken.size() == slabs;
    if (!enough && (floor == 0 || taken.empty())) return false;
    ForEachOther(others, [&](uint32_t slab, uint32_t number, Plane plane, uint64_t) {
      if (taken.contains(slab)) Take(number, plane);
    });
    given_ = std::move(given);
    taken_slabs_.insert(taken.begin(), taken.end());
    records_ += taken.size() * allocator_.RecordsPerSlab(need_.cls);
    return enough;
  }

  // For block numbers: what is on disk alone, then what is in memory too, least recently used
  // first.
  void WholeBlocks() {
    const uint64_t digests = table_.DigestBlocks() + (digests_ ? need_.blocks : 0);
    const bool digests_first = digests > table_.blocks_max() / kDigestNumbersPart;
    WholeBlocks(digests_first);
    WholeBlocks(!digests_first);
  }
  void WholeBlocks(bool digests) {
    if (NumbersEnough()) return;
    const auto take = [&](uint32_t number) {
      if (!table_.At(number).IsBusy() && dying_.insert(number).second) {
        set_.blocks.push_back(number);
        ++numbers_;
      }
      return !NumbersEnough();
    };
    order_.WalkDisk(digests, take);
    for (const ListKind kind : {ListKind::kOnce, ListKind::kAgain}) {
      for (uint32_t cls = 0; cls < order_.classes() && !NumbersEnough(); ++cls) {
        if (allocator_.IsDigests(cls) != digests) continue;
        order_.Walk(cls, Plane::kBase, kind, take);
      }
    }
  }

  const BlockTable& table_;
  const EvictionOrder& order_;
  const RecordAllocator& allocator_;
  const RoomNeed& need_;
  const EvictionRules& rules_;
  const bool digests_;  // the need is of digests
  const bool planes_apart_;
  const uint64_t digest_share_;  // slabs
  uint64_t records_;
  uint64_t numbers_;
  EvictionSet set_;
  absl::flat_hash_set<uint64_t> chosen_;  // record handles
  absl::flat_hash_set<uint32_t> taken_slabs_;        // of other classes
  absl::flat_hash_map<uint32_t, uint64_t> given_;  // those by class
  absl::flat_hash_set<uint32_t> dying_;   // block numbers
};

}  // namespace

std::optional<EvictionSet> PlanEviction(const BlockTable& table, const EvictionOrder& order,
                                        const RecordAllocator& allocator, const RoomNeed& need,
                                        const EvictionRules& rules) {
  return Planner(table, order, allocator, need, rules).Plan();
}

}  // namespace kvt
