#include "kvstore/transport/piece_copy.h"

#include <algorithm>

#include "kernels/layout/checksum.h"

namespace kvt {
namespace {

// What is prefetched of each page (256 to 512 B measured best: FACTS).
constexpr uint32_t kPrefetchBytes = 512;
constexpr uint32_t kPageBytes = 4096;

uint64_t SeedOf(uint64_t key_hash, Plane plane, uint32_t byte_in_record, uint32_t slice_bytes) {
  return ChecksumSeed(key_hash, plane, byte_in_record / slice_bytes);
}

}  // namespace

bool ScatterRange(const PullItem& item, uint32_t slice_bytes, uint32_t from, const std::byte* src,
                  uint32_t size) {
  bool good = true;
  for (uint32_t at = from; at < from + size;) {
    const uint32_t part = at / item.part_bytes;
    const uint32_t in_part = at % item.part_bytes;
    std::byte* dst = item.parts[part] + in_part;
    uint32_t run = std::min(item.part_bytes - in_part, from + size - at);
    if (item.checksums == nullptr) {
      CopyBytes(dst, src + (at - from), run, /*streaming=*/true);
    } else {
      run = slice_bytes;
      const uint64_t sum =
          CopyWithChecksum(dst, src + (at - from), run,
                           SeedOf(item.key_hash, item.plane, item.piece.offset + at, slice_bytes),
                           /*streaming=*/true);
      good &= sum == item.checksums[at / slice_bytes];
    }
    at += run;
  }
  return good;
}

void GatherRange(const PushItem& item, uint32_t slice_bytes, uint32_t from, uint32_t size,
                 std::byte* dst, bool compute) {
  for (uint32_t at = from; at < from + size;) {
    const uint32_t in_part = at % item.part_bytes;
    const std::byte* src = item.parts[at / item.part_bytes] + in_part;
    uint32_t run = std::min(item.part_bytes - in_part, from + size - at);
    if (!compute) {
      CopyBytes(dst + (at - from), src, run, /*streaming=*/false);
    } else {
      run = slice_bytes;
      item.checksums[at / slice_bytes] =
          CopyWithChecksum(dst + (at - from), src, run,
                           SeedOf(item.key_hash, item.plane, item.piece.offset + at, slice_bytes),
                           /*streaming=*/false);
    }
    at += run;
  }
}

void ChecksumRange(const PushItem& item, uint32_t slice_bytes, uint32_t from, uint32_t size) {
  for (uint32_t at = from; at < from + size; at += slice_bytes) {
    const std::byte* src = item.parts[at / item.part_bytes] + at % item.part_bytes;
    item.checksums[at / slice_bytes] = SliceChecksum(
        src, slice_bytes, SeedOf(item.key_hash, item.plane, item.piece.offset + at, slice_bytes));
  }
}

bool StorePiece(const ResolvedPush& to, const Piece& piece, const std::byte* src,
                uint32_t slice_bytes, absl::Span<const uint64_t> checksums) {
  if (checksums.empty()) {
    CopyBytes(to.data, src, piece.length, /*streaming=*/true);
    return true;
  }
  bool good = true;
  for (uint32_t at = 0; at < piece.length; at += slice_bytes) {
    const uint64_t sum = CopyWithChecksum(
        to.data + at, src + at, slice_bytes,
        SeedOf(to.key_hash, to.plane, piece.offset + at, slice_bytes), /*streaming=*/true);
    good &= sum == checksums[at / slice_bytes];
  }
  return good;
}

void PrefetchPiece(const std::byte* data, uint32_t size) {
  for (uint32_t page = 0; page < size; page += kPageBytes) {
    const uint32_t end = std::min(page + kPrefetchBytes, size);
    for (uint32_t at = page; at < end; at += 64) __builtin_prefetch(data + at);
  }
}

}  // namespace kvt
