// A store's memory: the record bytes and the table that tells same-host readers where each record
// lies. Both are sealed memfds that workers of this host map read-only
// (kvstore/media/shared_mapping).
//
// A record is one plane of one block (kernels/layout/geometry.h); the index decides which bytes it
// occupies. A block's digest record (4-bit keys of the selecting heads, DESIGN 1) has its place in
// the arena as one more class of records beside the planes'; none is written yet.
//
// Owned by the composition root; outlives the transport servers and the node. Readers may read at
// any time; who writes which bytes is the index's business.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/media/record_table.h"
#include "kvstore/media/shared_mapping.h"

namespace kvt {

class Arena {
 public:
  // `records`: entries of the record table. Pages are not populated: the first touch of each costs
  // until Populate has run over it. ResourceExhausted with sizes and remedy.
  static absl::StatusOr<Arena> Create(uint64_t bytes, uint32_t records);

  // Makes the pages of [offset, offset + bytes) exist. Thread-safe over disjoint ranges.
  // ResourceExhausted.
  absl::Status Populate(uint64_t offset, uint64_t bytes);

  [[nodiscard]] std::byte* data() { return mapping_.mutable_data(); }
  [[nodiscard]] uint64_t size() const { return bytes_; }
  [[nodiscard]] absl::Span<std::byte> bytes() { return {data(), bytes_}; }
  [[nodiscard]] const SharedMapping& mapping() const { return mapping_; }
  [[nodiscard]] RecordTable& table() { return table_; }

 private:
  Arena(SharedMapping mapping, RecordTable table, uint64_t bytes)
      : mapping_(std::move(mapping)), table_(std::move(table)), bytes_(bytes) {}

  SharedMapping mapping_;
  RecordTable table_;
  uint64_t bytes_;
};

}  // namespace kvt
