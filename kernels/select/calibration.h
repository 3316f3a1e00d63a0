// The calibration of a model (DESIGN 5): which heads select in each layer, and offset and scale of
// their digests' channels. Plain values, written as text that is the same to the byte for the same
// values; digests carry its id. Pure; thread-safe to read.
//
//   kvtide-calibration 1
//   model FINGERPRINT
//   geometry LAYERS KV_HEADS HEAD_DIM
//   bits 4
//   layer L dense | layer L heads H [H ...]       for each layer in order
//   ranking L BEST RUNNER_UP MARGIN MAM LEAST     after it
//   misses L LEAST STEP M [M ...]                 optional: misses per step by slots (MissCurve)
//   losses L X X X                                optional, after it: with kLossBlocks selected blocks
//   channels L H OFFSET SCALE [OFFSET SCALE ...]  for each selecting head, head_dim pairs
//   id ID                                         16 hex digits over all lines before
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/layout/geometry.h"

namespace kvt {

struct CalibrationHead {
  int kv_head = 0;
  std::vector<float> offset;  // [head_dim]
  std::vector<float> scale;   // > 0
};

// Selected blocks of the sizes at which a layer's loss is measured.
inline constexpr int kLossBlocks[] = {4, 16, 64};

struct CalibrationLayer {
  std::vector<CalibrationHead> heads;  // empty: the layer stays dense
  int best = 0;
  int runner_up = -1;
  double margin = 0;
  int mam_head = 0;
  int least_head = 0;
  int miss_least = 0;  // slots of misses[0]
  int miss_step = 0;
  std::vector<double> misses;
  // losses[i]: mean KL of the next token from full attention's, nats, when this layer alone attends to
  // sinks, recent tokens and kLossBlocks[i] selected blocks. Not rising; may be empty.
  std::vector<double> losses;
};

struct Calibration {
  std::string model;  // fingerprint (kernels/model/fingerprint.h)
  Geometry geometry;
  int bits = 4;
  std::vector<CalibrationLayer> layers;

  // 16 hex digits; equal calibrations have equal ids.
  [[nodiscard]] std::string Id() const;
  [[nodiscard]] std::string ToText() const;
  // Digest bytes of one block by layer; 0 where the layer is dense.
  [[nodiscard]] std::vector<uint32_t> DigestBytesByLayer() const;
  // Share of the KV bytes that digests take.
  [[nodiscard]] double DigestBytesShare() const;

  // InvalidArgument naming `file` and line: malformed, out of range, or an id that does not match.
  [[nodiscard]] static absl::StatusOr<Calibration> Parse(absl::string_view text,
                                                         absl::string_view file);
};

}  // namespace kvt
