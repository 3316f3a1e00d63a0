#include "kernels/model/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {

absl::StatusOr<std::unique_ptr<KvCache>> KvCache::Create(Device& device, const Geometry& geometry,
                                                         const KvCacheOptions& options) {
  KVT_RETURN_IF_ERROR(geometry.Validate());
  if (options.slot_count == 0 || options.slot_count == kSlotNone) {
    return absl::InvalidArgumentError(absl::StrCat("slot_count: ", options.slot_count));
  }
  if (options.table_rows <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("table_rows: ", options.table_rows));
  }
  if (options.blocks_per_row <= 0 || options.blocks_per_row > kSequenceBlocksMax) {
    return absl::InvalidArgumentError(absl::StrCat("blocks_per_row: ", options.blocks_per_row,
                                                   " is not in [1, ", kSequenceBlocksMax, "]"));
  }
  const size_t entries = static_cast<size_t>(options.table_rows) *
                         static_cast<size_t>(geometry.layers) *
                         static_cast<size_t>(options.blocks_per_row);
  KVT_ASSIGN_OR_RETURN(DeviceBuffer slots,
                       device.Allocate(size_t{options.slot_count} * geometry.SlotBytes()));
  KVT_ASSIGN_OR_RETURN(DeviceBuffer tables, device.Allocate(entries * sizeof(SlotPair)));
  // kSlotNone everywhere. Start-up: synchronous.
  std::unique_ptr<Stream> stream = device.NewStream(StreamPriority::kNormal);
  const std::vector<SlotPair> none(
      std::min(entries, Stream::kInlineWriteBytesMax / sizeof(SlotPair)));
  for (size_t at = 0; at < entries; at += none.size()) {
    stream->WriteToDevice(tables.as<SlotPair>() + at, none.data(),
                          std::min(none.size(), entries - at) * sizeof(SlotPair));
  }
  stream.reset();
  return std::unique_ptr<KvCache>(
      new KvCache(geometry, options, std::move(slots), std::move(tables)));
}

KvCache::KvCache(const Geometry& geometry, const KvCacheOptions& options, DeviceBuffer slots,
                 DeviceBuffer tables)
    : geometry_(geometry),
      options_(options),
      slots_(std::move(slots)),
      tables_(std::move(tables)) {}

uint8_t* KvCache::SlotAddress(uint32_t slot) const {
  KVT_CHECK(slot < options_.slot_count, "slot=", slot, " of ", options_.slot_count);
  return slots() + size_t{slot} * geometry_.SlotBytes();
}

SlotPair* KvCache::TableEntry(int row, int layer, int block) const {
  KVT_CHECK(row >= 0 && row < options_.table_rows, "row=", row);
  KVT_CHECK(layer >= 0 && layer < geometry_.layers, "layer=", layer);
  KVT_CHECK(block >= 0 && block <= options_.blocks_per_row, "block=", block);
  const size_t table = static_cast<size_t>(row) * static_cast<size_t>(geometry_.layers) +
                       static_cast<size_t>(layer);
  return tables_.as<SlotPair>() + table * static_cast<size_t>(options_.blocks_per_row) + block;
}

const SlotPair* KvCache::Table(int row, int layer) const { return TableEntry(row, layer, 0); }

void KvCache::SetTable(Stream& stream, int row, int layer, int first_block,
                       absl::Span<const SlotPair> pairs) {
  if (pairs.empty()) return;
  KVT_CHECK(first_block + static_cast<int>(pairs.size()) <= options_.blocks_per_row,
            "first_block=", first_block, " count=", pairs.size());
  for (const SlotPair& pair : pairs) {
    KVT_CHECK(pair.base == kSlotNone || pair.base < options_.slot_count, "slot=", pair.base);
    KVT_CHECK(pair.residual == kSlotNone || pair.residual < options_.slot_count,
              "slot=", pair.residual);
  }
  stream.WriteToDevice(TableEntry(row, layer, first_block), pairs.data(),
                       pairs.size() * sizeof(SlotPair));
}

void KvCache::SetTableAllLayers(Stream& stream, int row, int first_block, int blocks,
                                absl::Span<const SlotPair> pairs) {
  KVT_CHECK(static_cast<int>(pairs.size()) == blocks * geometry_.layers, "pairs=", pairs.size());
  for (int layer = 0; layer < geometry_.layers; ++layer) {
    SetTable(stream, row, layer, first_block,
             pairs.subspan(static_cast<size_t>(layer * blocks), static_cast<size_t>(blocks)));
  }
}

}  // namespace kvt
