// The KV of a worker on its device: the arena of slots and the block tables. It holds memory only;
// which slot belongs to whom is decided elsewhere (decode_worker/pool, the prefill worker's
// allocator), and a slot is handed on only behind the event of the work that may read it.
//
//   slots   [slot_count][Geometry::SlotBytes()]                 kernels/paged_kv.h
//   tables  [table_rows][layers][blocks_per_row] of SlotPair    one row a sequence
//
// A block needs one (base, residual) pair for each layer, so a TARGET block takes 2 * layers slots.
// Tables change only by stream-ordered operations; entries never set are kSlotNone.
// Thread-safety: SetTable as its stream; the rest is constant after Create.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device.h"
#include "kernels/layout/geometry.h"
#include "kernels/paged_kv.h"

namespace kvt {

struct KvCacheOptions {
  uint32_t slot_count = 0;  // > 0
  int table_rows = 0;       // sequences; > 0
  int blocks_per_row = 0;   // > 0, at most kSequenceBlocksMax
};

class KvCache {
 public:
  // InvalidArgument for sizes out of range, ResourceExhausted.
  [[nodiscard]] static absl::StatusOr<std::unique_ptr<KvCache>> Create(
      Device& device, const Geometry& geometry, const KvCacheOptions& options);

  [[nodiscard]] const Geometry& geometry() const { return geometry_; }
  [[nodiscard]] const KvCacheOptions& options() const { return options_; }
  // Device address of slot 0, and of a slot. On a host-addressable device the transfer code scatters
  // bursts right there.
  [[nodiscard]] uint8_t* slots() const { return slots_.as<uint8_t>(); }
  [[nodiscard]] uint8_t* SlotAddress(uint32_t slot) const;
  [[nodiscard]] uint64_t slot_bytes() const { return geometry_.SlotBytes(); }

  // Device address of the table of one row and layer.
  [[nodiscard]] const SlotPair* Table(int row, int layer) const;

  // Stream-ordered: entries [first_block, first_block + pairs.size()) of one row and layer.
  void SetTable(Stream& stream, int row, int layer, int first_block,
                absl::Span<const SlotPair> pairs);
  // The same for consecutive blocks of every layer: pairs[layer * blocks + i].
  void SetTableAllLayers(Stream& stream, int row, int first_block, int blocks,
                         absl::Span<const SlotPair> pairs);

 private:
  KvCache(const Geometry& geometry, const KvCacheOptions& options, DeviceBuffer slots,
          DeviceBuffer tables);
  [[nodiscard]] SlotPair* TableEntry(int row, int layer, int block) const;

  const Geometry geometry_;
  const KvCacheOptions options_;
  DeviceBuffer slots_;
  DeviceBuffer tables_;
};

}  // namespace kvt
