// The [decode] table of a decode worker's configuration.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "decode_worker/offload/offload_shape.h"
#include "kernels/base/limits.h"
#include "kernels/base/options.h"
#include "kernels/base/units.h"

namespace kvt {

struct DecodeOptions {
  // Device memory for the KV of the sequences in work.
  uint64_t slots_bytes = 1 * kGiB;
  // Beside them, for the digests of offloaded sequences; 0: an eighth of slots_bytes.
  uint64_t digest_bytes = 0;
  // Sequences held at once, and rows of a step.
  int batch_max = 32;
  // Sequences whose blocks are pulled at once.
  int pulls_max = 4;
  // A request nobody listens to is cancelled after this.
  absl::Duration detach_timeout = absl::Seconds(30);
  // How long a finished request's tokens can still be fetched.
  absl::Duration keep_finished = absl::Seconds(60);
  // How long a request whose stored blocks were lost waits for its recomputation.
  absl::Duration resume_timeout = absl::Seconds(60);
  // How long running sequences may take to end after SIGTERM.
  absl::Duration drain_timeout = absl::Seconds(20);
  // What of an offloaded request stays on the device.
  OffloadBudget offload;

  [[nodiscard]] uint64_t DigestBytesMax() const {
    return digest_bytes != 0 ? digest_bytes : slots_bytes / 8;
  }
};

// Reads the table; problems are collected in its file.
DecodeOptions ReadDecodeOptions(OptionsTable table);

}  // namespace kvt
