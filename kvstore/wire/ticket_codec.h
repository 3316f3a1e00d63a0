// Bytes of a Ticket: what SignedTicket.payload holds and the signature covers. Little-endian:
//
//   "KVTT" | version u8 | id u64 | epoch u32 | prompt_tokens u32 | output_tokens_max u32
//   | fidelity u8 | request_class u8 | present_by_unix_ms i64
//   | tenant, model, model_fingerprint, numerics_id, prefill_worker, decode_worker, decode_address,
//     capability: each u16 length and bytes
//   | store count u16 | per store: name, control_address, epoch u64, weight u32
//
// Pure; thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

inline constexpr size_t kTicketStringBytesMax = 1024;
inline constexpr size_t kTicketStoresMax = 1024;
inline constexpr size_t kTicketPayloadBytesMax = 4 * 1024 * 1024;

// Precondition: strings and stores within the bounds above.
[[nodiscard]] std::string EncodeTicket(const Ticket& ticket);

// InvalidArgument saying what is wrong and where: too short, too long, bad version, unknown enum,
// a length beyond its bound. Never allocates by a number from the payload.
// Does not check a signature: for a front end, which reads its own grant.
[[nodiscard]] absl::StatusOr<Ticket> DecodeTicket(absl::string_view payload);

}  // namespace kvt
