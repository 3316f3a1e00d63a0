// The coordinator's signed grant (DESIGN 1, 4, 7). The coordinator signs with Ed25519; stores and
// workers hold the public key: they can check tickets, not mint them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/base/ids.h"

namespace kvt {

// What a request permits: full attention over TARGET only; BASE too; the offloaded class too.
enum class Fidelity : uint8_t { kExact = 0, kElastic = 1, kSparse = 2 };
enum class RequestClass : uint8_t { kResident = 0, kOffloaded = 1 };

// One store of a cluster view, as far as placement and connecting need it.
struct StoreRef {
  NodeName name;
  BootEpoch epoch;
  std::string control_address;  // "host:port" of its gRPC control service
  uint32_t weight = 1;          // for weighted rendezvous hashing
  friend bool operator==(const StoreRef&, const StoreRef&) = default;
};

struct TicketRef {
  TicketId id;
  TicketEpoch epoch;
  friend bool operator==(const TicketRef&, const TicketRef&) = default;
};

struct Ticket {
  TicketId id;
  TicketEpoch epoch;
  std::string tenant;             // sharing domain; "" is the shared domain
  std::string model;              // name under which the workers registered
  std::string model_fingerprint;  // hex
  std::string numerics_id;
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens_max = 0;
  Fidelity fidelity = Fidelity::kExact;
  RequestClass request_class = RequestClass::kResident;
  NodeName prefill_worker;      // holder of grant P
  NodeName decode_worker;       // holder of grant D; empty before it is placed
  std::string decode_address;   // control address of decode_worker
  std::vector<StoreRef> stores; // the placement this ticket pins
  std::string capability;       // 16 random bytes: who knows them may attach and cancel
  int64_t present_by_unix_ms = 0;  // void for a first presentation after this
};

// A ticket's bytes with their signature; what travels.
struct SignedTicket {
  std::string payload;    // codec in ticket.cc, versioned
  std::string signature;  // 64 bytes, Ed25519
};

// The coordinator's key pair. Not copyable.
class TicketSigner {
 public:
  virtual ~TicketSigner() = default;
  [[nodiscard]] virtual SignedTicket Sign(const Ticket& ticket) const = 0;
  [[nodiscard]] virtual std::string PublicKey() const = 0;  // 32 raw bytes
  static std::unique_ptr<TicketSigner> Generate();
  // A PEM file with mode 0600; made when it does not exist. PermissionDenied when others may read it.
  static absl::StatusOr<std::unique_ptr<TicketSigner>> LoadOrCreate(absl::string_view path);
};

// Thread-safe.
class TicketVerifier {
 public:
  virtual ~TicketVerifier() = default;
  // Unauthenticated when the signature does not match, InvalidArgument when the payload is malformed.
  [[nodiscard]] virtual absl::StatusOr<Ticket> Verify(const SignedTicket& ticket) const = 0;
  static absl::StatusOr<std::unique_ptr<TicketVerifier>> FromPublicKey(absl::string_view raw32);
};

}  // namespace kvt
