// What a store writes beside a spilled record, to take it back after a restart: bytes of
// SpillWrite::meta, versioned (docs/FORMATS.md). Little-endian. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/layout/geometry.h"
#include "kvstore/index/index_types.h"

namespace kvt {

inline constexpr uint16_t kSpillMetaVersion = 1;

struct SpillMeta {
  Plane plane = Plane::kBase;
  uint64_t incarnation = 0;
  std::vector<uint64_t> checksums;  // one per slice; empty: its writer gave none
  // Of a BASE alone: what the block is. Its key is the record's.
  RestoredBlock block;
};

[[nodiscard]] std::string EncodeSpillMeta(const SpillMeta& meta);
// DataLoss: not such bytes, or of an unknown version. `block.incarnation` is set too.
absl::StatusOr<SpillMeta> DecodeSpillMeta(absl::string_view bytes);

}  // namespace kvt
