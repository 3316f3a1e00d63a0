// What the data plane moves: byte ranges of records. The transport knows nothing of the index: a
// handle is opaque to it, but for two facts that shared memory relies on (see RecordHandle).
#pragma once

#include <cstdint>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace kvt {

// A record and its generation as the store sees them: (generation << 32) | record index. Zero is no
// record. The low half indexes the record table (kvstore/media/record_table.h); a handle never
// stands for two contents in one boot of a store.
using RecordHandle = uint64_t;

constexpr RecordHandle MakeRecordHandle(uint32_t index, uint32_t generation) {
  return (static_cast<uint64_t>(generation) << 32) | index;
}
constexpr uint32_t RecordIndexOf(RecordHandle handle) { return static_cast<uint32_t>(handle); }
constexpr uint32_t GenerationOf(RecordHandle handle) { return static_cast<uint32_t>(handle >> 32); }

// One byte range of one record: a layer, a head range of a layer, many layers, a whole record.
// Offset and length are multiples of kPieceAlignment; with checksums, of the slice size too.
// This is the wire form (little endian, no padding).
struct Piece {
  uint64_t ticket = 0;  // whose pin (pull) or reservation (push) covers the record
  RecordHandle handle = 0;
  uint32_t offset = 0;        // bytes from the record's start
  uint32_t length = 0;        // bytes, > 0
  uint32_t ticket_epoch = 0;  // a higher epoch of the ticket fences this one
  uint32_t reserved = 0;      // must be zero
};
static_assert(sizeof(Piece) == 32 && std::is_trivially_copyable_v<Piece>);

// What became of one piece. Anything but kOk leaves its destination bytes undefined and is a miss
// of that piece, not an error of the burst.
enum class PieceStatus : uint8_t {
  kOk = 0,
  kLost = 1,          // evicted, another generation, not sealed (pull); record gone (push)
  kCorrupt = 2,       // a slice's checksum differed from the expected one
  kRefused = 3,       // no pin or reservation of this ticket and epoch in this session
  kInvalid = 4,       // range outside the record, misaligned, reserved bits set
  kNotAttempted = 5,  // the burst ended (deadline, cancel, close) before this piece was done
  // Since wire version 2:
  kOnDisk = 6,   // (pull) the record exists but not in memory: nothing was sent
  kExpired = 7,  // the session that pinned or reserved the record has ended (its lease is over)
};

// Verdicts that a peer of the wire version knows: numbers below it.
constexpr int PieceStatusesIn(uint16_t wire_version) { return wire_version >= 2 ? 8 : 6; }
// The verdict as a peer of that version is told: one that it does not know becomes the nearest that
// it does.
PieceStatus VerdictIn(uint16_t wire_version, PieceStatus status);

absl::string_view PieceStatusName(PieceStatus status);

}  // namespace kvt
