// Populates an arena with several threads and says how far it is, so that the start of a large
// store does not look like a hang (FIELD-CASES F20). Part of the store's composition root: its
// threads end before it returns.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "kvstore/media/arena.h"

namespace kvt {

// Logs progress about once a second and, at the end, seconds per GiB. ResourceExhausted. Cancelled
// within about a second of `should_stop`, which is asked on this thread, saying so.
absl::Status PopulateArena(Arena& arena, int threads, const std::function<bool()>& should_stop);

}  // namespace kvt
