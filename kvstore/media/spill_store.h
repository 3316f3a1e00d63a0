// The second medium of a store node: records that left memory, by name. What is kept, for whom and how
// long, the node decides; a SpillStore keeps whole records and what the node says of them.
//
//   Write -> durable -> Read ... -> Erase -> (Reclaim: its bytes are gone from the medium)
//
// 1. A record is there whole or not at all, whatever happens: a crash, a lost unsynced write, a full
//    disk. Read verifies the record's own checksum.
// 2. After Write has returned OK its records survive a crash and a power loss.
// 3. Calls block (they do I/O): they are made on the node's spill threads only, never under its lock.
//
// Implementations: RocksDB (rocksdb_spill_store.h); in memory with injected faults, for tests
// (tests/support). Thread-safe. Opened and closed by the composition root.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvt {

// What of a block a record is. The values are on disk: never change them.
enum class SpillPart : uint8_t { kBase = 0, kResidual = 1, kDigest = 2 };

struct SpillKey {
  std::array<uint8_t, 16> block{};  // the BlockKey's bytes
  SpillPart part = SpillPart::kBase;
  friend bool operator==(const SpillKey&, const SpillKey&) = default;
};

// All memory is borrowed during the call.
struct SpillWrite {
  SpillKey key;
  // What the node needs to take the record back after a restart (it defines and versions the bytes).
  absl::string_view meta;
  absl::Span<const std::byte> bytes;
};

struct SpillRead {
  SpillKey key;
  absl::Span<std::byte> bytes;  // exactly the record's size
};

struct SpillUsage {
  uint64_t records = 0;
  uint64_t live_bytes = 0;   // of records that Read finds, with their metadata
  uint64_t disk_bytes = 0;   // what the medium holds for them and for erased ones not reclaimed yet
  uint64_t quota_bytes = 0;  // of disk_bytes; 0: none
  uint64_t free_bytes = 0;   // of the file system
  bool failing = false;      // the last write failed; see `failure`
  absl::Status failure;
};

// False stops the scan.
using SpillVisitor =
    std::function<bool(const SpillKey& key, absl::string_view meta, uint64_t bytes)>;

class SpillStore {
 public:
  virtual ~SpillStore() = default;

  // Writes all of them, durably; an existing record of the same key is replaced. ResourceExhausted:
  // the quota or the disk is full (nothing of the batch counts as written). Unavailable: an I/O error,
  // named; the store tries again at the next call. On an error any subset may be there, each whole.
  virtual absl::Status Write(absl::Span<const SpillWrite> batch) = 0;
  // statuses[i] of reads[i]: OK; NotFound; DataLoss (torn, checksum or size differ: the record is
  // erased); Unavailable (I/O error, named).
  virtual void Read(absl::Span<const SpillRead> reads, absl::Span<absl::Status> statuses) = 0;
  // Unknown keys are no error.
  virtual absl::Status Erase(absl::Span<const SpillKey> keys) = 0;
  // Makes what was erased unreadable on the medium and gives its space back. May take long.
  virtual absl::Status Reclaim() = 0;
  // Every whole record, without its bytes, in any order. Records that are torn or of an unknown
  // version are erased and not visited.
  virtual absl::Status Scan(const SpillVisitor& visit) = 0;
  [[nodiscard]] virtual SpillUsage Usage() const = 0;
};

}  // namespace kvt
