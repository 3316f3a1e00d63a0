// The folder of a spill store before RocksDB opens it: made, checked for its format and for
// O_DIRECT.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace kvt {

// Makes folder, folder/FORMAT (durably, before anything else) and folder/staging where they are
// missing. FailedPrecondition: a format that is not opened, files that are not ours, or no O_DIRECT
// where it is wanted; Unavailable: I/O errors. Each names the folder and the remedy.
absl::Status PrepareSpillFolder(const std::string& folder, bool direct_io);

}  // namespace kvt
