#include "kvstore/transport/attach_message.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace kvt {
namespace {

constexpr uint32_t kAttachMagic = 0x7476746b;  // "ktvt"

}  // namespace

AttachHello MakeAttachHello(const SessionToken& token, const TransportSettings& settings,
                            uint64_t channel, TransportVersions versions) {
  AttachHello hello;
  hello.magic = kAttachMagic;
  hello.version_min = versions.min;
  hello.version_max = versions.max;
  hello.session = token.session.value();
  std::copy(token.secret.begin(), token.secret.end(), hello.secret);
  hello.layers = static_cast<uint32_t>(token.geometry.layers);
  hello.kv_heads = static_cast<uint32_t>(token.geometry.kv_heads);
  hello.head_dim = static_cast<uint32_t>(token.geometry.head_dim);
  hello.layout = static_cast<uint32_t>(token.geometry.layout);
  hello.geometry_fingerprint = token.geometry.Fingerprint();
  hello.receive_segment_bytes = settings.receive_segment_bytes;
  hello.io_vector_max = settings.io_vector_max;
  hello.channel = channel;
  return hello;
}

absl::StatusOr<CheckedHello> CheckAttachHello(absl::Span<const std::byte> bytes,
                                              const TransportSettings& settings,
                                              TransportVersions versions) {
  AttachHello hello;
  if (bytes.size() != sizeof(hello)) {
    return absl::InvalidArgumentError(
        absl::StrCat("attach: hello of ", bytes.size(), " bytes, not ", sizeof(hello)));
  }
  std::memcpy(&hello, bytes.data(), sizeof(hello));
  if (hello.magic != kAttachMagic || hello.reserved != 0) {
    return absl::InvalidArgumentError("attach: not a kvtide hello");
  }
  if (hello.version_min > versions.max || hello.version_max < versions.min ||
      hello.version_min > hello.version_max) {
    return absl::FailedPreconditionError(absl::StrCat(
        "attach: client speaks wire versions ", hello.version_min, " to ", hello.version_max,
        ", this store ", versions.min, " to ", versions.max, "; update the older one"));
  }
  const TransportSettings theirs{hello.receive_segment_bytes, hello.io_vector_max};
  if (theirs != settings) {
    return absl::FailedPreconditionError(absl::StrCat(
        "attach: client's transport settings are segment ", theirs.receive_segment_bytes,
        " and io vector ", theirs.io_vector_max, ", this store's ", settings.receive_segment_bytes,
        " and ", settings.io_vector_max));
  }
  if (hello.layers > 256 || hello.kv_heads > 128 || hello.head_dim > 256 || hello.layout > 255) {
    return absl::InvalidArgumentError("attach: geometry out of range");
  }
  CheckedHello checked;
  checked.version = std::min(hello.version_max, versions.max);
  SessionToken& token = checked.token;
  token.session = SessionId(hello.session);
  std::copy(std::begin(hello.secret), std::end(hello.secret), token.secret.begin());
  token.geometry.layers = static_cast<int>(hello.layers);
  token.geometry.kv_heads = static_cast<int>(hello.kv_heads);
  token.geometry.head_dim = static_cast<int>(hello.head_dim);
  token.geometry.layout = static_cast<NamedLayout>(hello.layout);
  KVT_RETURN_IF_ERROR(token.geometry.Validate());
  if (token.geometry.Fingerprint() != hello.geometry_fingerprint) {
    return absl::FailedPreconditionError(
        absl::StrCat("attach: client computes fingerprint ",
                     absl::Hex(hello.geometry_fingerprint, absl::kZeroPad16), " for geometry ",
                     token.geometry.ToString(), ", this store ",
                     absl::Hex(token.geometry.Fingerprint(), absl::kZeroPad16)));
  }
  return checked;
}

AttachReply MakeAttachReply(const absl::Status& status, uint16_t version, uint64_t connection,
                            uint64_t arena_bytes) {
  AttachReply reply;
  reply.magic = kAttachMagic;
  reply.code = static_cast<uint16_t>(status.code());
  if (!status.ok()) {
    const size_t size = std::min(status.message().size(), sizeof(reply.message) - 1);
    std::memcpy(reply.message, status.message().data(), size);
    return reply;
  }
  reply.version = version;
  reply.connection = connection;
  reply.arena_bytes = arena_bytes;
  return reply;
}

absl::StatusOr<AttachReply> CheckAttachReply(absl::Span<const std::byte> bytes,
                                             TransportVersions versions) {
  AttachReply reply;
  if (bytes.size() != sizeof(reply)) {
    return absl::InternalError(
        absl::StrCat("attach: reply of ", bytes.size(), " bytes, not ", sizeof(reply)));
  }
  std::memcpy(&reply, bytes.data(), sizeof(reply));
  reply.message[sizeof(reply.message) - 1] = 0;
  if (reply.magic != kAttachMagic || reply.code > 16) {
    return absl::InternalError("attach: not a kvtide reply");
  }
  if (reply.code != 0) {
    return absl::Status(static_cast<absl::StatusCode>(reply.code), reply.message);
  }
  if (reply.version < versions.min || reply.version > versions.max) {
    return absl::FailedPreconditionError(
        absl::StrCat("attach: the store chose wire version ", reply.version, ", this worker speaks ",
                     versions.min, " to ", versions.max));
  }
  return reply;
}

}  // namespace kvt
