// Bytes of the spill folder (docs/FORMATS.md, "Spill"). Pure; integers are little-endian but for
// sequences, which sort.
//
//   entry's key     block key[16] | part u8
//   entry           version u8 = 1 | 0 u8[3] | meta length u32 | sequence u64 | record bytes u64
//                   | record checksum u64 | entry checksum u64 | meta
//   record's key    sequence u64, big-endian
//   contents        the last record of a segment: entry keys of its other records, in order, 17
//   bytes
//                   each | checksum u64
//
// Checksums: SliceChecksum (XXH3-64 mixed with a seed), the seed made of the key and of what is
// summed, so that bytes of another record never pass. The entry's is over all before it and the
// meta.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvstore/media/spill_store.h"

namespace kvt {

// Of the folder. A change of any layout here makes a new one; the one before is still opened.
inline constexpr uint32_t kSpillFormat = 1;
inline constexpr uint32_t kSpillFormatOldest = 1;
static_assert(kSpillFormat - kSpillFormatOldest <= 1);

inline constexpr uint8_t kSpillEntryVersion = 1;
inline constexpr size_t kSpillKeyBytes = 17;
inline constexpr size_t kSpillEntryBytes = 40;  // without the meta
inline constexpr size_t kSpillMetaBytesMax = 64 * 1024;

struct SpillEntry {
  uint64_t sequence = 0;
  uint64_t bytes = 0;
  uint64_t checksum = 0;   // of the record
  absl::string_view meta;  // borrowed
};

std::string EncodeSpillKey(const SpillKey& key);
// False: these bytes are no key.
bool DecodeSpillKey(absl::string_view bytes, SpillKey* key);

std::string EncodeSpillEntry(const SpillKey& key, const SpillEntry& entry);
// DataLoss: torn, damaged, of another key or an unknown version. The meta borrows from `bytes`.
absl::StatusOr<SpillEntry> DecodeSpillEntry(const SpillKey& key, absl::string_view bytes);

std::string EncodeSpillSequence(uint64_t sequence);
bool DecodeSpillSequence(absl::string_view bytes, uint64_t* sequence);

std::string EncodeSpillContents(uint64_t first, absl::Span<const SpillKey> keys);
absl::StatusOr<std::vector<SpillKey>> DecodeSpillContents(uint64_t first, absl::string_view bytes);

uint64_t SpillRecordChecksum(const SpillKey& key, const void* bytes, size_t size);
// The same, of what is copied.
uint64_t CopySpillRecord(const SpillKey& key, void* to, const void* from, size_t size);

// The content of the file FORMAT, and what it says. FailedPrecondition: no such file of ours, or a
// version that is not opened, named.
std::string EncodeSpillFormat(uint32_t version);
absl::StatusOr<uint32_t> CheckSpillFormat(absl::string_view text);

}  // namespace kvt
