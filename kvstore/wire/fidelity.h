// Names of fidelities and classes, as users and configurations write them, and counts by provenance.
// Pure.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"
#include "kvstore/index/block_key.h"
#include "kvstore/wire/coordinator_api.h"
#include "kvstore/wire/ticket.h"

namespace kvt {

// "exact", "elastic", "sparse".
[[nodiscard]] inline absl::string_view FidelityName(Fidelity fidelity) {
  switch (fidelity) {
    case Fidelity::kExact: return "exact";
    case Fidelity::kElastic: return "elastic";
    case Fidelity::kSparse: return "sparse";
  }
  return "unknown";
}

[[nodiscard]] inline std::optional<Fidelity> FidelityNamed(absl::string_view name) {
  for (const Fidelity fidelity : {Fidelity::kExact, Fidelity::kElastic, Fidelity::kSparse}) {
    if (name == FidelityName(fidelity)) return fidelity;
  }
  return std::nullopt;
}

// The count of tokens of that provenance.
[[nodiscard]] inline uint64_t& CountOf(Provenance provenance, TokenCounts& counts) {
  switch (provenance) {
    case Provenance::kExact: return counts.exact;
    case Provenance::kBase: return counts.base;
    case Provenance::kSparse: break;
  }
  return counts.sparse;
}

// "resident", "offloaded".
[[nodiscard]] inline absl::string_view RequestClassName(RequestClass request_class) {
  return request_class == RequestClass::kOffloaded ? "offloaded" : "resident";
}

}  // namespace kvt
