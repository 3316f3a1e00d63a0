// The calibration of a model, from its file.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/layout/geometry.h"
#include "kernels/select/calibration.h"

namespace kvt {

// Reads the file and compares it with the model it is to serve. NotFound; InvalidArgument naming file
// and line (Calibration::Parse); FailedPrecondition naming file and field, both sides and the remedy.
[[nodiscard]] absl::StatusOr<Calibration> LoadCalibration(const std::string& path,
                                                          absl::string_view fingerprint,
                                                          const Geometry& geometry);

}  // namespace kvt
