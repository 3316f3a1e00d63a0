#include "kvstore/media/rocksdb_spill_format.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/check.h"
#include "kernels/base/random.h"
#include "kernels/layout/checksum.h"

namespace kvt {
namespace {

enum class Summed : uint64_t { kRecord = 1, kEntry = 2, kContents = 3 };
constexpr absl::string_view kFormatName = "kvtide spill ";

template <typename T>
void Put(T value, char* to) {
  std::memcpy(to, &value, sizeof value);  // x86-64: little-endian
}
template <typename T>
T Get(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint64_t SeedOf(const SpillKey& key, Summed what) {
  uint64_t words[2];
  std::memcpy(words, key.block.data(), sizeof words);
  return Mix64(words[0] ^ Mix64(words[1] ^ Mix64((static_cast<uint64_t>(what) << 8) |
                                                 static_cast<uint64_t>(key.part))));
}

uint64_t EntryChecksum(const SpillKey& key, const char* entry, size_t size) {
  // Fields before the checksum, and the meta behind it.
  const uint64_t seed = SliceChecksum(entry, 32, SeedOf(key, Summed::kEntry));
  return SliceChecksum(entry + kSpillEntryBytes, size - kSpillEntryBytes, seed);
}

}  // namespace

std::string EncodeSpillKey(const SpillKey& key) {
  std::string bytes(reinterpret_cast<const char*>(key.block.data()), key.block.size());
  bytes.push_back(static_cast<char>(key.part));
  return bytes;
}

bool DecodeSpillKey(absl::string_view bytes, SpillKey* key) {
  if (bytes.size() != kSpillKeyBytes) return false;
  std::memcpy(key->block.data(), bytes.data(), key->block.size());
  key->part = static_cast<SpillPart>(bytes[16]);
  return static_cast<uint8_t>(bytes[16]) <= static_cast<uint8_t>(SpillPart::kDigest);
}

std::string EncodeSpillEntry(const SpillKey& key, const SpillEntry& entry) {
  KVT_CHECK(entry.meta.size() <= kSpillMetaBytesMax, entry.meta.size());
  std::string bytes(kSpillEntryBytes, '\0');
  bytes[0] = static_cast<char>(kSpillEntryVersion);
  Put(static_cast<uint32_t>(entry.meta.size()), &bytes[4]);
  Put(entry.sequence, &bytes[8]);
  Put(entry.bytes, &bytes[16]);
  Put(entry.checksum, &bytes[24]);
  bytes.append(entry.meta.data(), entry.meta.size());
  Put(EntryChecksum(key, bytes.data(), bytes.size()), &bytes[32]);
  return bytes;
}

absl::StatusOr<SpillEntry> DecodeSpillEntry(const SpillKey& key, absl::string_view bytes) {
  if (bytes.size() < kSpillEntryBytes ||
      bytes.size() != kSpillEntryBytes + Get<uint32_t>(bytes.data() + 4)) {
    return absl::DataLossError("spill entry is torn");
  }
  if (static_cast<uint8_t>(bytes[0]) != kSpillEntryVersion) {
    return absl::DataLossError(
        absl::StrCat("spill entry of unknown version ", static_cast<uint8_t>(bytes[0])));
  }
  if (EntryChecksum(key, bytes.data(), bytes.size()) != Get<uint64_t>(bytes.data() + 32)) {
    return absl::DataLossError("spill entry is damaged");
  }
  SpillEntry entry;
  entry.sequence = Get<uint64_t>(bytes.data() + 8);
  entry.bytes = Get<uint64_t>(bytes.data() + 16);
  entry.checksum = Get<uint64_t>(bytes.data() + 24);
  entry.meta = bytes.substr(kSpillEntryBytes);
  return entry;
}

std::string EncodeSpillSequence(uint64_t sequence) {
  std::string bytes(8, '\0');
  Put(__builtin_bswap64(sequence), bytes.data());
  return bytes;
}

bool DecodeSpillSequence(absl::string_view bytes, uint64_t* sequence) {
  if (bytes.size() != 8) return false;
  *sequence = __builtin_bswap64(Get<uint64_t>(bytes.data()));
  return true;
}

std::string EncodeSpillContents(uint64_t first, absl::Span<const SpillKey> keys) {
  std::string bytes;
  bytes.reserve(keys.size() * kSpillKeyBytes + 8);
  for (const SpillKey& key : keys) bytes += EncodeSpillKey(key);
  const uint64_t seed = Mix64(first ^ static_cast<uint64_t>(Summed::kContents));
  const uint64_t sum = SliceChecksum(bytes.data(), bytes.size(), seed);
  bytes.append(reinterpret_cast<const char*>(&sum), sizeof sum);
  return bytes;
}

absl::StatusOr<std::vector<SpillKey>> DecodeSpillContents(uint64_t first, absl::string_view bytes) {
  if (bytes.size() < 8 || (bytes.size() - 8) % kSpillKeyBytes != 0) {
    return absl::DataLossError("a segment's contents are torn");
  }
  const size_t size = bytes.size() - 8;
  const uint64_t seed = Mix64(first ^ static_cast<uint64_t>(Summed::kContents));
  if (SliceChecksum(bytes.data(), size, seed) != Get<uint64_t>(bytes.data() + size)) {
    return absl::DataLossError("a segment's contents are damaged");
  }
  std::vector<SpillKey> keys(size / kSpillKeyBytes);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!DecodeSpillKey(bytes.substr(i * kSpillKeyBytes, kSpillKeyBytes), &keys[i])) {
      return absl::DataLossError("a segment's contents name an unknown part");
    }
  }
  return keys;
}

uint64_t SpillRecordChecksum(const SpillKey& key, const void* bytes, size_t size) {
  return SliceChecksum(bytes, size, SeedOf(key, Summed::kRecord));
}

uint64_t CopySpillRecord(const SpillKey& key, void* to, const void* from, size_t size) {
  const uint64_t seed = SeedOf(key, Summed::kRecord);
  if (size % 64 == 0 && size > 0)
    return CopyWithChecksum(to, from, size, seed, /*streaming=*/false);
  if (size > 0) std::memcpy(to, from, size);
  return SliceChecksum(to, size, seed);
}

std::string EncodeSpillFormat(uint32_t version) { return absl::StrCat(kFormatName, version, "\n"); }

absl::StatusOr<uint32_t> CheckSpillFormat(absl::string_view text) {
  uint32_t version = 0;
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, kFormatName) ||
      !absl::SimpleAtoi(absl::StripTrailingAsciiWhitespace(rest), &version)) {
    return absl::FailedPreconditionError("FORMAT is not of a kvtide spill folder");
  }
  if (version < kSpillFormatOldest || version > kSpillFormat) {
    return absl::FailedPreconditionError(
        absl::StrCat("the folder has format ", version, ", this version opens ", kSpillFormatOldest,
                     " to ", kSpillFormat, ": use the version that wrote it, or empty the folder"));
  }
  return version;
}

}  // namespace kvt
