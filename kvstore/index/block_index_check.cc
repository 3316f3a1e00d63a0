// The index's invariants, checked one by one.
#include "kernels/base/check.h"
#include "kvstore/index/block_index.h"

namespace kvt {

void BlockIndex::CheckBlock(uint32_t number) const {
  const Block& block = table_.At(number);
  const bool sealed = block.state == BlockState::kSealed;
  const bool held = block.IsHeld();
  KVT_CHECK(sealed || (block.pins == 0 && !block.indexed && !block.IsOnDisk()), number);
  KVT_CHECK(block.pinner == nullptr || (block.pins > 0 && block.pinner->pins.contains(number)),
            "who pins block ", number);
  KVT_CHECK(block.state != BlockState::kEvicting || block.IsBusy(), number);
  KVT_CHECK(!sealed || block.indexed || held, "nobody finds or holds block ", number);
  KVT_CHECK(!block.indexed || block.HasPlane(Plane::kBase), "no BASE: block ", number);
  KVT_CHECK(!block.IsOnDisk() || block.indexed, "on disk, but found by nobody: block ", number);
  KVT_CHECK(!block.purged || !block.indexed, "purged, but found: block ", number);
  KVT_CHECK(!block.unpublished || block.provenance != Provenance::kExact, number);
  for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
    const auto p = static_cast<size_t>(plane);
    const uint64_t record = PlaneRecordHandle(table_.HandleOf(number), plane);
    KVT_CHECK((block.moving[p] == Moving::kSpilling) == disk_.spilling.contains(record), number);
    KVT_CHECK((block.moving[p] == Moving::kPromoting) == disk_.landings.contains(record), number);
    KVT_CHECK(block.moving[p] != Moving::kSpilling || block.InMemory(plane), number);
    KVT_CHECK(block.moving[p] != Moving::kPromoting || !block.InMemory(plane), number);
    KVT_CHECK(block.in_flight[p] == 0 || block.InMemory(plane), number);
    const bool listed = sealed && block.InMemory(plane);
    KVT_CHECK((block.list[p] != ListKind::kNone) == listed, number);
    KVT_CHECK(!listed || (block.list[p] == ListKind::kHeld) == held, number);
  }
  KVT_CHECK((block.list[kDiskLinks] != ListKind::kNone) == (sealed && block.IsOnDisk() && !held),
            number);
  if (block.indexed) {
    const auto it = sealed_.find(block.key);
    KVT_CHECK(it != sealed_.end() && it->second == number, number);
  }
}

void BlockIndex::CheckInvariants() {
  std::array<uint64_t, kBlockStates> bytes{};
  std::array<uint64_t, kPlanes> disk_bytes{}, disk_records{};
  std::vector<BlockTable::DomainBytes> domains(domains_.names().size());
  uint64_t pins = 0, pinned = 0, in_flight = 0, listed = 0, indexed = 0, unnamed = 0, digests = 0;
  uint64_t landing_bytes = 0, spilling_bytes = 0, leaving_bytes = 0;
  absl::flat_hash_map<uint64_t, uint32_t> owner;  // record offset -> block
  for (uint32_t number = 0; number < table_.NumbersEnd(); ++number) {
    const Block& block = table_.At(number);
    if (block.state == BlockState::kFree) continue;
    CheckBlock(number);
    KVT_CHECK(!block.unpublished || !block.indexed || tickets_.Find(block.ticket) != nullptr,
              "its ticket has ended: block ", number);
    const uint64_t record_bytes = allocator_.RecordBytes(block.cls);
    const bool digest = table_.IsDigest(block);
    digests += digest ? 1 : 0;
    for (size_t p = 0; p < kPlanes; ++p) {
      in_flight += block.in_flight[p] > 0 ? 1 : 0;
      if (block.on_disk[p]) {
        disk_bytes[p] += record_bytes;
        ++disk_records[p];
        domains[block.domain].disk += record_bytes;
        if (digest) domains[block.domain].digest_disk += record_bytes;
      }
      const uint64_t record = PlaneRecordHandle(table_.HandleOf(number), static_cast<Plane>(p));
      if (const auto it = disk_.spilling.find(record); it != disk_.spilling.end()) {
        spilling_bytes += record_bytes;
        leaving_bytes += it->second ? record_bytes : 0;
      }
      if (const auto it = disk_.landings.find(record); it != disk_.landings.end()) {
        landing_bytes += record_bytes;
        KVT_CHECK(owner.emplace(it->second, number).second, "landing in use: ", number);
      }
      if (block.offset[p] == kNoOffset) continue;
      KVT_CHECK(owner.emplace(block.offset[p], number).second, "record in two blocks: ", number);
      bytes[static_cast<size_t>(block.state)] += record_bytes;
      domains[block.domain].memory += record_bytes;
      if (digest) domains[block.domain].digest_memory += record_bytes;
    }
    for (const ListKind kind : block.list) listed += kind != ListKind::kNone ? 1 : 0;
    pins += block.pins;
    pinned += block.pins > 0 ? 1 : 0;
    indexed += block.indexed ? 1 : 0;
    unnamed += block.token_count == 0 ? 1 : 0;
  }
  const IndexStats stats = Stats();
  KVT_CHECK(pins == stats.pins && pinned == stats.pinned_blocks && in_flight == stats.in_flight,
            pins, " ", pinned, " ", in_flight);
  KVT_CHECK(listed == order_.size() && indexed == sealed_.size(), listed, " ", order_.size());
  KVT_CHECK(unnamed == stats.output_reserved_blocks && digests == table_.DigestBlocks(), unnamed);
  KVT_CHECK(bytes[static_cast<size_t>(BlockState::kReserved)] == stats.reserved_bytes &&
            bytes[static_cast<size_t>(BlockState::kWriting)] == stats.writing_bytes &&
            bytes[static_cast<size_t>(BlockState::kEvicting)] == stats.evicting_bytes &&
            bytes[static_cast<size_t>(BlockState::kSealed)] ==
                stats.resident_bytes[0] + stats.resident_bytes[1]);
  KVT_CHECK(landing_bytes == stats.promoting_bytes && spilling_bytes == stats.spilling_bytes &&
            leaving_bytes == disk_.leaving_bytes);
  KVT_CHECK(disk_bytes == stats.disk_bytes && disk_records == stats.disk_records);
  uint64_t digest_disk = 0;
  for (uint32_t domain = 0; domain < domains.size(); ++domain) {
    KVT_CHECK(table_.OfDomain(domain) == domains[domain], "domain ", domain);
    digest_disk += domains[domain].digest_disk;
  }
  KVT_CHECK(digest_disk == table_.DigestDiskBytes(), digest_disk);
  KVT_CHECK(stats.used_bytes == stats.resident_bytes[0] + stats.resident_bytes[1] +
                                    stats.reserved_bytes + stats.writing_bytes +
                                    stats.evicting_bytes + stats.promoting_bytes);
  KVT_CHECK(stats.used_bytes <= stats.capacity_bytes);
}

}  // namespace kvt
