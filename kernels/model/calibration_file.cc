#include "kernels/model/calibration_file.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/units.h"

namespace kvt {
namespace {

// The largest geometry with every head selecting takes less.
constexpr std::streamoff kCalibrationBytesMax = 256 * static_cast<std::streamoff>(kMiB);

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = in ? static_cast<std::streamoff>(in.tellg()) : -1;
  if (size < 0) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  if (size > kCalibrationBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", size, " bytes: not a calibration"));
  }
  std::string text(static_cast<size_t>(size), '\0');
  in.seekg(0);
  in.read(text.data(), size);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  return text;
}

}  // namespace

absl::StatusOr<Calibration> LoadCalibration(const std::string& path, absl::string_view fingerprint,
                                            const Geometry& geometry) {
  KVT_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  KVT_ASSIGN_OR_RETURN(Calibration calibration, Calibration::Parse(text, path));
  if (calibration.model != fingerprint) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": model: calibrated for ", calibration.model, ", this model is ",
                     fingerprint, "; run kvtide calibrate for it"));
  }
  if (calibration.geometry != geometry) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": geometry: calibrated for ", calibration.geometry.ToString(),
                     ", this model has ", geometry.ToString(), "; run kvtide calibrate for it"));
  }
  return calibration;
}

}  // namespace kvt
