// Every block that holds records, in any state, and the bytes of each state and medium. Pure; not
// thread-safe (owned by BlockIndex).
//
//   kFree -> kReserved -> kWriting -> kSealed -> kFree
//                 \           \          \-> kEvicting -> kFree
//                  \-----------\----------/
// kEvicting: nobody finds the block any more, but a running transfer still touches its records.
//
// A plane of a sealed block is placed apart from the other (offset = in memory):
//
//                      kSpilling                            kNone            kPromoting
//   memory alone --(bytes being written)--> memory and disk ----> disk alone --(landing)--> both
//
// 1. A record belongs to one block; the bytes by state and those of landings sum to the
//    allocator's used_bytes(). A landing is memory that a promotion fills; nobody reads it.
// 2. A block number's generation rises each time it is freed, so no handle ever stands for two
//    contents in one boot; a number whose generations are used up is retired.
// 3. RecordEvents are told of a record exactly while its block is kSealed.
// 4. Only planes of sealed blocks are on disk. A sealed block has its BASE in memory or on disk.
// 5. Memory is not freed while a transfer, a write to disk or a promotion touches it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
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
  // The record's bytes are on disk alone now.
  virtual void OnMovedToDisk(uint64_t record_handle) = 0;
  // The record is gone, wherever it was.
  virtual void OnWithdrawn(uint64_t record_handle) = 0;
};

// What the spill threads do with a plane.
enum class Moving : uint8_t { kNone = 0, kSpilling, kPromoting };

// EvictionOrder's.
enum class ListKind : uint8_t { kNone = 0, kOnce, kAgain, kHeld };
inline constexpr size_t kListKinds = 4;
inline constexpr size_t kDiskLinks = kPlanes;
inline constexpr size_t kBlockLists = kPlanes + 1;
struct BlockLinks {
  uint32_t older = UINT32_MAX;
  uint32_t newer = UINT32_MAX;
};

inline constexpr uint32_t kNoBlock = UINT32_MAX;

struct Holder;

struct alignas(64) Block {
  // One cache line has all that a transfer reads and writes: a burst touches hundreds of blocks.
  uint32_t generation = 1;
  BlockState state = BlockState::kFree;
  std::array<bool, kPlanes> on_disk{};
  bool indexed = false;  // lookups find it
  RecordAllocator::ClassId cls = 0;
  uint32_t pins = 0;  // holders
  const Holder* pinner = nullptr;  // the latest of them, while it pins; null: one may pin all the same
  std::array<uint32_t, kPlanes> in_flight{};                   // running transfers
  std::array<uint64_t, kPlanes> offset{kNoOffset, kNoOffset};  // in memory
  uint32_t space = 0;     // model, numerics and geometry, interned by BlockIndex
  uint32_t arrivals = 0;  // of Arrivals, while kWriting
  std::array<Moving, kPlanes> moving{};
  bool hit_again = false;  // by a ticket other than its first, lately
  bool reused = false;     // by a ticket other than its first, ever

  alignas(8) BlockKey key;
  BlockKey parent;
  TicketId ticket;       // whose reservation it is; when hidden, who may read it
  SessionId session;     // whose reservation it is
  TicketId last_ticket;  // that used it
  std::array<int32_t, kBlockTokens> tokens{};
  uint8_t token_count = 0;
  Provenance provenance = Provenance::kExact;
  bool ticket_private = false;
  bool unpublished = false;  // approximate, and its ticket lives
  bool purged = false;  // its tenant's data is to go: never indexed again
  uint32_t domain = 0;  // tenant, interned
  // Of this content, kept over restarts: planes on disk are joined only when they agree on it.
  uint64_t incarnation = 0;
  absl::Time hold_until = absl::InfinitePast();  // promoted lately: stays while it is held
  std::array<BlockLinks, kBlockLists> links;
  std::array<ListKind, kBlockLists> list{};

  void TakeName(const BlockName& name) {
    key = name.key;
    parent = name.parent;
    std::copy(name.tokens.begin(), name.tokens.end(), tokens.begin());
    token_count = static_cast<uint8_t>(name.tokens.size());
    provenance = name.provenance;
  }
  // Its own ticket alone may find it.
  [[nodiscard]] bool IsHiddenFrom(TicketId other) const {
    return (ticket_private || unpublished) && ticket != other;
  }
  [[nodiscard]] bool InMemory(Plane plane) const {
    return offset[static_cast<size_t>(plane)] != kNoOffset;
  }
  [[nodiscard]] bool OnDisk(Plane plane) const { return on_disk[static_cast<size_t>(plane)]; }
  [[nodiscard]] bool HasPlane(Plane plane) const { return InMemory(plane) || OnDisk(plane); }
  [[nodiscard]] std::array<bool, kPlanes> OnDiskAlone() const {
    return {on_disk[0] && offset[0] == kNoOffset, on_disk[1] && offset[1] == kNoOffset};
  }
  [[nodiscard]] bool IsOnDisk() const { return on_disk[0] || on_disk[1]; }
  [[nodiscard]] bool IsUnsealed() const {
    return state == BlockState::kReserved || state == BlockState::kWriting;
  }
  [[nodiscard]] bool IsInFlight() const { return (in_flight[0] | in_flight[1]) != 0; }
  // Not to be evicted: someone pins it or a transfer touches it.
  [[nodiscard]] bool IsHeld() const { return pins > 0 || IsInFlight(); }
  // Its memory is touched or about to be.
  [[nodiscard]] bool IsBusy() const {
    return IsInFlight() || moving[0] != Moving::kNone || moving[1] != Moving::kNone;
  }
};

static_assert(offsetof(Block, key) == 64);

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
  uint32_t Allocate(RecordAllocator::ClassId cls, uint32_t domain);
  // A block without records, kSealed. Precondition: a number is left.
  uint32_t AllocateEmpty(RecordAllocator::ClassId cls, uint32_t domain);
  void SetState(uint32_t number, BlockState state);
  // Frees its records and its number. Precondition: not in use, not pinned, not busy, nothing on
  // disk.
  void Free(uint32_t number);
  // Frees the memory of a sealed block's plane. Precondition: nothing touches it.
  void FreeRecord(uint32_t number, Plane plane);
  // The plane of a sealed block is on disk, or not any more.
  void SetOnDisk(uint32_t number, Plane plane, bool on_disk);
  // Memory for a promotion. Precondition: a record is left.
  uint64_t AllocateLanding(uint32_t number);
  void FreeLanding(uint32_t number, uint64_t offset);
  // The landing, filled, becomes the plane's memory. Precondition: sealed, not in memory.
  void InstallLanding(uint32_t number, Plane plane, uint64_t offset);

  [[nodiscard]] Block& At(uint32_t number) {
    return chunks_[number / kChunkBlocks][number % kChunkBlocks];
  }
  [[nodiscard]] const Block& At(uint32_t number) const {
    return chunks_[number / kChunkBlocks][number % kChunkBlocks];
  }
  // Fetches what a transfer of the block will touch.
  void Prefetch(uint32_t number) const {
    if (number < numbers_end_) __builtin_prefetch(&At(number), /*rw=*/1);
  }
  // The block of the number when it is of that generation and not free; null otherwise.
  [[nodiscard]] Block* Find(uint32_t number, uint32_t generation);
  [[nodiscard]] uint64_t HandleOf(uint32_t number) const {
    return MakeBlockHandle(number, At(number).generation);
  }
  [[nodiscard]] uint64_t NumbersLeft() const {
    return free_.size() + (blocks_max_ - numbers_end_);
  }
  // Block numbers given out so far: all are below this.
  [[nodiscard]] uint32_t NumbersEnd() const { return numbers_end_; }

  [[nodiscard]] uint64_t BytesOf(BlockState state) const {
    return bytes_[static_cast<size_t>(state)];
  }
  [[nodiscard]] uint64_t SealedBytesOf(Plane plane) const {
    return sealed_bytes_[static_cast<size_t>(plane)];
  }
  [[nodiscard]] uint64_t CountOf(BlockState state) const {
    return counts_[static_cast<size_t>(state)];
  }
  [[nodiscard]] uint64_t landing_bytes() const { return landing_bytes_; }
  [[nodiscard]] uint64_t DiskBytesOf(Plane plane) const {
    return disk_bytes_[static_cast<size_t>(plane)];
  }
  [[nodiscard]] uint64_t DiskRecordsOf(Plane plane) const {
    return disk_records_[static_cast<size_t>(plane)];
  }
  [[nodiscard]] bool IsDigest(const Block& block) const { return allocator_.IsDigests(block.cls); }
  // Of digests: bytes on disk, and blocks in any state.
  [[nodiscard]] uint64_t DigestDiskBytes() const { return digest_disk_bytes_; }
  [[nodiscard]] uint64_t DigestBlocks() const { return digest_blocks_; }
  [[nodiscard]] uint32_t blocks_max() const { return blocks_max_; }
  // Of a sharing domain, in any state, without landings.
  struct DomainBytes {
    uint64_t memory = 0;
    uint64_t disk = 0;
    uint64_t digest_memory = 0;  // of `memory`
    uint64_t digest_disk = 0;    // of `disk`
    friend bool operator==(const DomainBytes&, const DomainBytes&) = default;
  };
  [[nodiscard]] DomainBytes OfDomain(uint32_t domain) const {
    return domain < domains_.size() ? domains_[domain] : DomainBytes();
  }
  // Heap of the table, about.
  [[nodiscard]] uint64_t MemoryBytes() const {
    return chunks_.size() * kChunkBlocks * sizeof(Block) + free_.capacity() * sizeof(uint32_t);
  }

 private:
  static constexpr uint32_t kChunkBlocks = 256;

  void Account(const Block& block, int sign);
  uint32_t TakeNumber(RecordAllocator::ClassId cls, uint32_t domain);

  RecordAllocator& allocator_;
  RecordEvents& events_;
  const uint32_t blocks_max_;
  std::vector<std::unique_ptr<Block[]>> chunks_;  // by number; references stay valid
  uint32_t numbers_end_ = 0;                      // given out so far
  std::vector<uint32_t> free_;
  std::array<uint64_t, kBlockStates> bytes_{};
  std::array<uint64_t, kBlockStates> counts_{};
  std::array<uint64_t, kPlanes> sealed_bytes_{};
  std::array<uint64_t, kPlanes> disk_bytes_{};
  std::array<uint64_t, kPlanes> disk_records_{};
  uint64_t landing_bytes_ = 0;
  uint64_t digest_disk_bytes_ = 0;
  uint64_t digest_blocks_ = 0;
  std::vector<DomainBytes> domains_;
};

}  // namespace kvt
