// Named maxima of the data plane. What is measured rather than derived says so.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "kernels/base/limits.h"
#include "kernels/base/units.h"

namespace kvt {

// Version of the attach handshake and of the messages behind it. A node speaks its own and the one
// before. 2 added the verdicts `on disk` and `expired` (piece.h).
inline constexpr uint16_t kTransportWireVersion = 2;
inline constexpr uint16_t kTransportWireVersionMin = 1;

// What one end claims to speak. The default is the truth; tests play older and newer peers.
struct TransportVersions {
  uint16_t min = kTransportWireVersionMin;
  uint16_t max = kTransportWireVersion;
};

// Alignment of offsets, lengths, sources and destinations: streaming stores need it.
inline constexpr uint32_t kPieceAlignment = 64;

// Pieces of one data message: UCX sends them as one I/O vector. With UCX_TCP_MAX_IOV = 16 one entry
// is the header's (more aborts the process: FACTS).
inline constexpr int kMessagePiecesMax = 15;
// Payload of one data message; longer pieces are split. 15 pieces of 64 KiB.
inline constexpr uint32_t kMessageBytesMax = 960 * static_cast<uint32_t>(kKiB);
// Data messages of one channel that a sender keeps in flight (4: measured best). These are the
// credits of a pull: a reader that takes nothing makes the store hold so much and no more.
inline constexpr int kMessagesInFlightMax = 4;
inline constexpr uint64_t kChannelBytesInFlightMax =
    uint64_t{kMessagesInFlightMax} * kMessageBytesMax;

// Pieces of one request message; a burst is split into as many as it needs.
inline constexpr int kRequestPiecesMax = 2048;
// Request messages of one channel whose answers are outstanding.
inline constexpr int kRequestsInFlightMax = 8;

// Bursts of one channel that are accepted and not finished; one more is ResourceExhausted.
inline constexpr int kChannelBurstsMax = 256;
// Pieces of one burst.
inline constexpr uint32_t kBurstPiecesCeiling = 1u << 20;

// Channels of one client transport, and connections of one server.
inline constexpr int kTransportChannelsMax = 256;
inline constexpr int kServerConnectionsMax = 1024;

// Shared memory: bytes of one client's push ring.
inline constexpr uint64_t kPushRingBytes = 8 * kMiB;

// A connection that has not attached by then is closed by the server.
inline constexpr absl::Duration kAttachTimeout = absl::Seconds(5);
// A server's send to one client that has not completed by then closes that client's endpoint.
inline constexpr absl::Duration kServerSendTimeout = absl::Seconds(10);

static_assert(kBurstPiecesMax <= static_cast<int>(kBurstPiecesCeiling));

}  // namespace kvt
