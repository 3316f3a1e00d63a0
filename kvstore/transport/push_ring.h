// A ring of push messages from one client to the store, in memory that both write. The store trusts
// nothing in it: it keeps its own positions and checks every number against the ring's size.
//
//   control page | answers[256] | data
//   message = RingMessage (64 B) | meta (push_message.h) | padding to 64 | data
//
// Messages are contiguous and 64-byte aligned; kPad fills the rest before the end. `head` counts
// bytes the client wrote, `tail` bytes the store has consumed. The store answers messages in order.
// Whoever is about to sleep says so in the control page, looks once more, and is then woken through
// an eventfd.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/base/units.h"
#include "kvstore/media/shared_mapping.h"
#include "kvstore/transport/limits.h"
#include "kvstore/transport/push_message.h"

namespace kvt {

// Messages of a ring that are not answered: the client keeps below it.
inline constexpr uint32_t kRingAnswers = 256;
inline constexpr uint32_t kRingMessagesMax = 128;
static_assert(kRingMessagesMax <= kRingAnswers);

struct RingControl {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
  alignas(64) std::atomic<uint64_t> answers_head;
  alignas(64) std::atomic<uint64_t> answers_tail;
  alignas(64) std::atomic<uint32_t> store_sleeps;
  alignas(64) std::atomic<uint32_t> client_sleeps;
};
static_assert(sizeof(RingControl) <= 4096);

enum class RingKind : uint32_t { kPush = 1, kPad = 2 };

struct RingMessage {
  uint32_t magic = 0;
  RingKind kind{};
  uint32_t total = 0;  // bytes with header and padding, a multiple of 64
  uint32_t count = 0;
  uint32_t data_bytes = 0;
  uint32_t has_checksums = 0;
  uint64_t id = 0;
  uint64_t reserved[4] = {};
};
static_assert(sizeof(RingMessage) == 64);

struct RingAnswer {
  uint64_t id = 0;
  uint32_t count = 0;
  uint32_t reserved = 0;
  MessageStatuses statuses{};
};
static_assert(sizeof(RingAnswer) == 32);

inline constexpr uint32_t kRingMagic = 0x7276746b;
inline constexpr uint64_t kRingDataOffset = RoundUp(4096 + kRingAnswers * sizeof(RingAnswer), 4096);
inline constexpr uint64_t kRingMappingBytes = kRingDataOffset + kPushRingBytes;
static_assert(kPushRingBytes >= 4 * (kMessageBytesMax + kPushMetaBytesMax + 4096));

// The client's end. Not thread-safe.
class PushRingWriter {
 public:
  explicit PushRingWriter(SharedMapping mapping);
  // Where a message of so many meta and data bytes may be written, or null when the ring is full.
  struct Place {
    std::byte* meta;
    std::byte* data;
  };
  std::optional<Place> Reserve(size_t meta_bytes, uint32_t data_bytes);
  // Publishes what was reserved. True: the store sleeps, wake it.
  bool Commit(uint64_t id, int count, bool has_checksums);
  // The store's next answer, if there is one.
  std::optional<RingAnswer> TakeAnswer();
  // True when it is safe to sleep until the eventfd; false: an answer came meanwhile.
  bool PrepareSleep();
  void EndSleep();

 private:
  RingControl& control() const;
  SharedMapping mapping_;
  uint64_t head_ = 0;
  uint64_t answers_ = 0;
  uint32_t meta_bytes_ = 0;
  uint32_t data_bytes_ = 0;
};

// The store's end. Not thread-safe.
class PushRingReader {
 public:
  explicit PushRingReader(SharedMapping mapping);
  struct Message {
    RingMessage header;                // a private copy
    absl::Span<const std::byte> body;  // meta, padding and data; the client may still change it
  };
  // The next message, if there is one. InvalidArgument: the client broke the ring.
  absl::StatusOr<std::optional<Message>> Peek();
  // Gives the peeked message's memory back and answers it. InvalidArgument when the client does not
  // take its answers. Sets *wake when the client sleeps.
  absl::Status Answer(const Message& message, const MessageStatuses& statuses, bool* wake);
  bool PrepareSleep();
  void EndSleep();

 private:
  RingControl& control() const;
  SharedMapping mapping_;
  uint64_t tail_ = 0;
  uint64_t answers_ = 0;
};

}  // namespace kvt
