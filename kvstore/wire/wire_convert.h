// Between our structs and the generated messages of common.proto, and the checks every decoder
// needs. Private to kvstore/wire's .cc files.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/layout/geometry.h"
#include "kvstore/wire/common.pb.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/ticket.h"
#include "kvstore/wire/version.h"

namespace kvt::rpc {

void ToWire(const Geometry& from, kvtide::Geometry* to);
void ToWire(const SignedTicket& from, kvtide::SignedTicket* to);
void ToWire(const TicketRef& from, kvtide::TicketRef* to);
void ToWire(const StoreRef& from, kvtide::StoreRef* to);
void ToWire(const TokenCounts& from, kvtide::TokenCounts* to);
void ToWire(const WireVersionRange& from, kvtide::VersionRange* to);

// The values as sent: whoever uses a geometry validates it. An unknown layout is kept as its number.
Geometry FromWire(const kvtide::Geometry& from);
SignedTicket FromWire(const kvtide::SignedTicket& from);
TicketRef FromWire(const kvtide::TicketRef& from);
StoreRef FromWire(const kvtide::StoreRef& from);
TokenCounts FromWire(const kvtide::TokenCounts& from);
WireVersionRange FromWire(const kvtide::VersionRange& from);

inline int64_t ToNs(absl::Duration d) { return absl::ToInt64Nanoseconds(d); }
inline absl::Duration FromNs(int64_t ns) { return absl::Nanoseconds(ns); }

// An enum in [0, last]; InvalidArgument naming `field` otherwise.
template <typename Enum>
absl::StatusOr<Enum> ToEnum(uint32_t value, Enum last, absl::string_view field) {
  if (value > static_cast<uint32_t>(last)) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": unknown value ", value));
  }
  return static_cast<Enum>(value);
}

template <typename To, typename From>
std::vector<To> ToVector(const From& from) {
  return std::vector<To>(from.begin(), from.end());
}

}  // namespace kvt::rpc
