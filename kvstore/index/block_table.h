// Every block that holds records, in any state, and the bytes of each state. Pure; not thread-safe
// (owned by BlockIndex).
//
//   kFree -> kReserved -> kWriting -> kSealed -> kFree
//                 \           \          \-> kEvicting -> kFree
//                  \-----------\----------/
// kEvicting: nobody finds the block any more, but a running transfer still touches its records.
//
// 1. A record belongs to one block; the bytes by state sum to the allocator's used_bytes().
// 2. A block number's generation rises each time it is freed, so no handle ever stands for two
//    contents in one boot; a number whose generations are used up is retired.
// 3. RecordEvents are told of a record exactly while its block is kSealed.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "kernels/base/ids.h"
#include "kvstore/index/block_handle.h"
#include "kvstore/index/block_name.h"
#include "kvstore/index/record_allocator.h"

namespace kvt {

enum class BlockState : uint8_t { kFree = 0, kReserved, kWriting, kSealed, kEvicting };
inline constexpr int kBlockStates = 5;

// Told when records become readable and before their memory may be reused. Called under the index
// owner's lock: must be short and must not call back.
class RecordEvents {
 public:
  virtual ~RecordEvents() = default;
  // The record's bytes, at `offset` in the arena, are final.
  virtual void OnSealed(uint64_t record_handle, uint64_t offset) = 0;
  virtual void OnWithdrawn(uint64_t record_handle) = 0;
};

inline constexpr uint32_t kNoBlock = UINT32_MAX;

struct Block {
  BlockKey key;
  BlockKey parent;
  std::array<int32_t, kBlockTokens> tokens{};
  uint8_t token_count = 0;
  Provenance provenance = Provenance::kExact;
  BlockState state = BlockState::kFree;
  bool ticket_private = false;
  bool indexed = false;    // lookups find it
  bool hit_again = false;  // by a ticket other than its first
  uint32_t generation = 1;
  RecordAllocator::ClassId cls = 0;
  uint32_t space = 0;     // model, numerics and geometry, interned by BlockIndex
  uint32_t domain = 0;    // tenant, interned
  uint32_t arrivals = 0;  // of Arrivals, while kWriting
  TicketId ticket;        // whose reservation it is; when private, who may read it
  SessionId session;      // whose reservation it is
  TicketId last_ticket;   // that used it
  uint32_t pins = 0;      // holders
  std::array<uint32_t, kPlanes> in_flight{};  // running transfers
  std::array<uint64_t, kPlanes> offset{kNoOffset, kNoOffset};
  // EvictionOrder's.
  uint32_t older = kNoBlock;
  uint32_t newer = kNoBlock;
  bool in_order = false;

  [[nodiscard]] bool HasPlane(Plane plane) const {
    return offset[static_cast<size_t>(plane)] != kNoOffset;
  }
  [[nodiscard]] bool IsUnsealed() const {
    return state == BlockState::kReserved || state == BlockState::kWriting;
  }
  [[nodiscard]] bool IsInFlight() const { return (in_flight[0] | in_flight[1]) != 0; }
};

class BlockTable {
 public:
  // `allocator` and `events` outlive the table.
  BlockTable(RecordAllocator& allocator, RecordEvents& events, uint32_t blocks_max)
      : allocator_(allocator), events_(events), blocks_max_(blocks_max) {}
  // Withdraws nothing: the arena goes with the index.
  ~BlockTable() = default;
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;

  // A block with both planes' records, kReserved. Precondition: a number and two records are left.
  uint32_t Allocate(RecordAllocator::ClassId cls);
  void SetState(uint32_t number, BlockState state);
  // Frees its records and its number. Precondition: not in use, not pinned, not in flight.
  void Free(uint32_t number);
  // Frees the RESIDUAL record of a sealed block that has it and that no transfer touches.
  void DropResidual(uint32_t number);

  [[nodiscard]] Block& At(uint32_t number) { return blocks_[number]; }
  [[nodiscard]] const Block& At(uint32_t number) const { return blocks_[number]; }
  // The block of the number when it is of that generation and not free; null otherwise.
  [[nodiscard]] Block* Find(uint32_t number, uint32_t generation);
  [[nodiscard]] uint64_t HandleOf(uint32_t number) const {
    return MakeBlockHandle(number, blocks_[number].generation);
  }
  [[nodiscard]] uint64_t NumbersLeft() const {
    return free_.size() + (blocks_max_ - blocks_.size());
  }
  // Block numbers given out so far: all are below this.
  [[nodiscard]] uint32_t NumbersEnd() const { return static_cast<uint32_t>(blocks_.size()); }

  [[nodiscard]] uint64_t BytesOf(BlockState state) const {
    return bytes_[static_cast<size_t>(state)];
  }
  [[nodiscard]] uint64_t SealedBytesOf(Plane plane) const {
    return sealed_bytes_[static_cast<size_t>(plane)];
  }
  [[nodiscard]] uint64_t CountOf(BlockState state) const {
    return counts_[static_cast<size_t>(state)];
  }

 private:
  void Account(const Block& block, int sign);

  RecordAllocator& allocator_;
  RecordEvents& events_;
  const uint32_t blocks_max_;
  std::deque<Block> blocks_;  // by number; references stay valid
  std::vector<uint32_t> free_;
  std::array<uint64_t, kBlockStates> bytes_{};
  std::array<uint64_t, kBlockStates> counts_{};
  std::array<uint64_t, kPlanes> sealed_bytes_{};
};

}  // namespace kvt
