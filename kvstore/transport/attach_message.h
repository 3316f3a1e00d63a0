// The first message on every connection, and its answer: who the worker is and what both ends must
// agree on before a byte of data moves. Fixed wire structs, little endian, no padding; the same for
// shared memory and ucx.
#pragma once

#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/transport/transport.h"

namespace kvt {

// Settings of the transport itself that differ only by a mistake, and abort a peer if they do.
struct TransportSettings {
  uint32_t receive_segment_bytes = 0;  // UCX_TCP_RX_SEG_SIZE; zero for shared memory
  uint32_t io_vector_max = 0;          // UCX_TCP_MAX_IOV; zero for shared memory
  friend bool operator==(const TransportSettings&, const TransportSettings&) = default;
};

struct AttachHello {
  uint32_t magic = 0;
  uint16_t version_min = 0;
  uint16_t version_max = 0;
  uint64_t session = 0;
  uint8_t secret[16] = {};
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t layout = 0;
  uint64_t geometry_fingerprint = 0;
  uint32_t receive_segment_bytes = 0;
  uint32_t io_vector_max = 0;
  uint64_t channel = 0;  // the client's id of the channel, echoed in every answer (ucx)
  uint64_t reserved = 0;
};
static_assert(sizeof(AttachHello) == 80 && std::is_trivially_copyable_v<AttachHello>);

struct AttachReply {
  uint32_t magic = 0;
  uint16_t version = 0;     // chosen; zero when refused
  uint16_t code = 0;        // absl::StatusCode
  uint64_t connection = 0;  // the server's id of the connection, echoed in every request (ucx)
  uint64_t arena_bytes = 0;
  char message[232] = {};  // why refused; zero-terminated
};
static_assert(sizeof(AttachReply) == 256 && std::is_trivially_copyable_v<AttachReply>);

AttachHello MakeAttachHello(const SessionToken& token, const TransportSettings& settings,
                            uint64_t channel, TransportVersions versions = {});

struct CheckedHello {
  SessionToken token;
  uint16_t version = 0;  // the highest that both speak: what the connection speaks from now on
};

// What a hello says. InvalidArgument (size, magic, reserved bits, geometry out of range);
// FailedPrecondition (no common version, other settings, fingerprint that does not belong to the
// geometry: both sides named).
absl::StatusOr<CheckedHello> CheckAttachHello(absl::Span<const std::byte> bytes,
                                              const TransportSettings& settings,
                                              TransportVersions versions = {});

// `status` as the answer to a hello; `version` as CheckAttachHello chose.
AttachReply MakeAttachReply(const absl::Status& status, uint16_t version, uint64_t connection,
                            uint64_t arena_bytes);
// The reply if it accepts; else its status. Internal when malformed, FailedPrecondition when it
// chose a version outside `versions`.
absl::StatusOr<AttachReply> CheckAttachReply(absl::Span<const std::byte> bytes,
                                             TransportVersions versions = {});

}  // namespace kvt
