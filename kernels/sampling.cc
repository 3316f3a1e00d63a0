#include "kernels/sampling.h"

#include "absl/strings/str_cat.h"

namespace kvt {

absl::Status SampleParams::Validate() const {
  // Written so that a NaN is refused.
  if (!(temperature >= 0 && temperature <= 100)) {
    return absl::InvalidArgumentError(
        absl::StrCat("temperature: ", temperature, " is not in [0, 100]"));
  }
  if (top_k < 0 || top_k > kTopKMax) {
    return absl::InvalidArgumentError(absl::StrCat("top_k: ", top_k, " is not in [0, ", kTopKMax, "]"));
  }
  if (!(top_p > 0 && top_p <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat("top_p: ", top_p, " is not in (0, 1]"));
  }
  return absl::OkStatus();
}

}  // namespace kvt
