// What belongs to whom: quota, accounting and purge by sharing domain.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "kvstore/index/block_index.h"
#include "kvstore/index/limits.h"

namespace kvt {

bool BlockIndex::PlanTenantRoom(uint32_t domain, RecordAllocator::ClassId cls, uint64_t bytes,
                                std::vector<uint64_t>* records) const {
  if (options_.tenant_bytes_max == 0 || bytes == 0) return true;
  if (bytes > options_.tenant_bytes_max) return false;
  const uint64_t held = table_.OfDomain(domain).memory;
  if (held + bytes <= options_.tenant_bytes_max) return true;
  uint64_t wanted = held + bytes - options_.tenant_bytes_max;
  absl::flat_hash_set<uint64_t> taken;
  const auto take = [&](RecordAllocator::ClassId of, Plane plane, ListKind kind, uint64_t& left) {
    const uint64_t record_bytes = allocator_.RecordBytes(of);
    const bool both = allocator_.IsDigests(of) && plane == Plane::kBase;
    uint64_t skipped = 0;
    order_.Walk(of, plane, kind, [&](uint32_t number) {
      const Block& block = table_.At(number);
      if (left == 0) return false;
      const uint64_t record = PlaneRecordHandle(table_.HandleOf(number), plane);
      if (block.domain != domain || !MayLeave(block, plane) || !taken.insert(record).second) {
        return ++skipped < kTenantSkipsMax;
      }
      // One half of a digest is of no use.
      const uint64_t other = PlaneRecordHandle(table_.HandleOf(number), Plane::kResidual);
      if (both && MayLeave(block, Plane::kResidual) && taken.insert(other).second) {
        records->push_back(other);
        left -= std::min(left, record_bytes);
      }
      records->push_back(record);
      left -= std::min(left, record_bytes);
      return true;
    });
  };
  // RESIDUAL first, so that a BASE that goes for good takes no plane along that is counted again.
  const auto take_of = [&](bool of_digests, uint64_t& left) {
    for (const ListKind kind : {ListKind::kOnce, ListKind::kAgain}) {
      for (const Plane plane : {of_digests ? Plane::kBase : Plane::kResidual,
                                of_digests ? Plane::kResidual : Plane::kBase}) {
        for (RecordAllocator::ClassId of = 0; of < order_.classes(); ++of) {
          if (allocator_.IsDigests(of) == of_digests) take(of, plane, kind, left);
        }
      }
    }
  };
  // As in eviction_plan.h: digests beyond their share, KV, the other digests.
  const uint64_t digests =
      table_.OfDomain(domain).digest_memory + (allocator_.IsDigests(cls) ? bytes : 0);
  const uint64_t beyond_share = std::min(wanted, DigestExcess(digests, options_.tenant_bytes_max));
  uint64_t left = beyond_share;
  take_of(true, left);
  wanted -= beyond_share - left;
  take_of(false, wanted);
  take_of(true, wanted);
  return wanted == 0;
}

uint64_t BlockIndex::PurgeTenant(absl::string_view tenant) {
  const std::optional<uint32_t> domain = domains_.Find(tenant);
  if (!domain.has_value()) return 0;
  uint64_t met = 0;
  for (uint32_t number = 0; number < table_.NumbersEnd(); ++number) {
    Block& block = table_.At(number);
    if (block.state == BlockState::kFree || block.domain != *domain || block.token_count == 0) {
      continue;
    }
    ++met;
    block.purged = true;
    if (!block.indexed) continue;
    Unindex(number);
    Settle(number);
  }
  return met;
}

BlockTable::DomainBytes BlockIndex::BytesOfTenant(absl::string_view tenant) const {
  const std::optional<uint32_t> domain = domains_.Find(tenant);
  return domain.has_value() ? table_.OfDomain(*domain) : BlockTable::DomainBytes();
}

std::vector<BlockIndex::TenantUse> BlockIndex::TopTenants(size_t tenants_max) const {
  std::vector<std::pair<uint64_t, uint32_t>> sums;  // bytes, domain
  for (uint32_t domain = 0; domain < domains_.names().size(); ++domain) {
    const BlockTable::DomainBytes bytes = table_.OfDomain(domain);
    if (bytes.memory + bytes.disk > 0) sums.emplace_back(bytes.memory + bytes.disk, domain);
  }
  const size_t count = std::min(tenants_max, sums.size());
  std::partial_sort(sums.begin(), sums.begin() + static_cast<ptrdiff_t>(count), sums.end(),
                    [](const auto& a, const auto& b) {
                      return a.first != b.first ? a.first > b.first : a.second < b.second;
                    });
  std::vector<TenantUse> tenants;
  for (size_t i = 0; i < count; ++i) {
    tenants.emplace_back(domains_.names()[sums[i].second], table_.OfDomain(sums[i].second));
  }
  return tenants;
}

}  // namespace kvt
