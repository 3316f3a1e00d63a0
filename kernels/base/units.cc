#include "kernels/base/units.h"

#include "absl/strings/str_format.h"

namespace kvt {

std::string FormatBytes(uint64_t bytes) {
  if (bytes >= kGiB) return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / kGiB);
  if (bytes >= kMiB) return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / kMiB);
  if (bytes >= kKiB) return absl::StrFormat("%.1f KiB", static_cast<double>(bytes) / kKiB);
  return absl::StrFormat("%d B", bytes);
}

}  // namespace kvt
