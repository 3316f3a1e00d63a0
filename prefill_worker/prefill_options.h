// The [prefill] table of a prefill worker's configuration.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "kernels/base/limits.h"
#include "kernels/base/options.h"
#include "kernels/base/units.h"

namespace kvt {

struct PrefillOptions {
  // Tokens of one step; a multiple of 16. Larger steps compute faster, smaller ones let a short
  // prompt start sooner behind a long one.
  int chunk_tokens = 256;
  // Device memory for the KV of the prompts in work.
  uint64_t slots_bytes = 1 * kGiB;
  // Jobs that hold slots at once.
  int active_max = 16;
  // Jobs that wait for slots; one more is refused.
  int queue_max = 256;
  // A waiting job is overtaken by smaller ones for so long.
  absl::Duration ageing_bound = absl::Seconds(10);
  // How long a job waits for room in the stores, and for a store to be reachable.
  absl::Duration store_wait = absl::Seconds(5);
  // A job that has waited for room for so long is aged: one such job per store at a time keeps what
  // room there is until it has enough, and newer ones wait behind it.
  absl::Duration reserve_ageing = absl::Milliseconds(500);
  // How long a finished job waits for a decode worker that takes it.
  absl::Duration hand_over_wait = absl::Seconds(60);
  // Stored KV that would take longer to fetch than to compute, by what was measured lately, is
  // computed. Off: everything stored is fetched.
  bool fetch_planner = true;
  // Tokens, sink and recent ones included, of an offloaded request's first selection in a layer.
  int selection_tokens = 2048;
  // How long running jobs may take to end after SIGTERM.
  absl::Duration drain_timeout = absl::Seconds(20);
  // Chrome trace (JSON array) of every layer's compute and push; empty: none.
  std::string trace_file;
};

// Reads the table; problems are collected in its file.
PrefillOptions ReadPrefillOptions(OptionsTable table);

}  // namespace kvt
