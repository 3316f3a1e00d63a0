// The active messages of the data plane over UCX. Every message is one active message with this
// fixed header; its payload stands behind it.
//
//   worker                                   store
//   kAttach      hello            ------>
//                                 <------    kAttachReply  reply
//   kPull        Piece[count]     ------>
//                                 <------    kPullData     bytes of the next pieces, in order
//   kCancel                       ------>                  (stops the rest of a pull)
//   kPush        meta, data       ------>
//                                 <------    kPushAck      verdicts
//
// A pull's answer is a row of one-fragment eager messages, each an I/O vector straight from the
// arena: at most 15 pieces and 960 KiB, 4 in flight, and the next message's pieces are prefetched
// before the current one is sent (measured best over TCP: FACTS). The receiver copies the bytes out
// in the callback. A piece longer than the room left is split at a slice boundary.
//
// Ids: `channel` is the receiver's own id of the connection (slot and generation), so that a late
// message of an old one is dropped; `request` is the client's id of a pull or push message.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kvstore/transport/attach_message.h"
#include "kvstore/transport/limits.h"
#include "kvstore/transport/push_message.h"

namespace kvt {

// The settings of both ends (FACTS, traps): compared at attach, set by ucp_config_modify.
inline constexpr uint32_t kUcxReceiveSegmentBytes = 1032 * static_cast<uint32_t>(kKiB);
inline constexpr int kUcxIoVectorMax = 16;
static_assert(kMessagePiecesMax + 1 == kUcxIoVectorMax);
static_assert(kMessageBytesMax + kPushMetaBytesMax + 4096 < kUcxReceiveSegmentBytes);

inline constexpr unsigned kUcxMessageId = 7;  // the one active message id

enum class UcxMessageType : uint16_t {
  kAttach = 1,
  kAttachReply = 2,
  kPull = 3,
  kPullData = 4,
  kCancel = 5,
  kPush = 6,
  kPushAck = 7,
};

inline constexpr uint32_t kUcxMagic = 0x6d76746b;  // "ktvm"

struct UcxHeader {
  uint32_t magic = kUcxMagic;
  UcxMessageType type{};
  uint16_t has_checksums = 0;  // kPush
  uint64_t channel = 0;
  uint64_t request = 0;
  uint32_t first = 0;          // kPullData: index in the request of the first piece
  uint32_t count = 0;          // pieces
  uint32_t skip = 0;           // kPullData: bytes of the first piece that came before
  uint32_t bytes = 0;          // kPullData, kPush: data bytes
  MessageStatuses statuses{};  // kPullData, kPushAck
  uint64_t reserved = 0;
};
static_assert(sizeof(UcxHeader) == 64 && std::is_trivially_copyable_v<UcxHeader>);

}  // namespace kvt
