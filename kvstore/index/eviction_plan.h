// Whom to evict so that so many blocks of a class fit. Decides only; evicts nothing. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvstore/index/block_table.h"
#include "kvstore/index/eviction_order.h"
#include "kvstore/index/record_allocator.h"

namespace kvt {

// Victims after whose eviction `blocks` blocks of class `cls` can be allocated; empty when they can
// be now. Takes the coldest of the class itself first; when those do not suffice, whole slabs of
// other classes, those first whose warmest block is coldest. Nothing when there is no such set:
// then the caller refuses, and evicts nothing.
[[nodiscard]] std::optional<std::vector<uint32_t>> PlanEviction(const BlockTable& table,
                                                                const EvictionOrder& order,
                                                                const RecordAllocator& allocator,
                                                                RecordAllocator::ClassId cls,
                                                                uint64_t blocks);

}  // namespace kvt
