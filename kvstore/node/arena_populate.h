// Populates an arena with several threads and says how far it is, so that the start of a large
// store does not look like a hang (FIELD-CASES F20). Part of the store's composition root: its
// threads end before it returns.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "kvstore/media/arena.h"

namespace kvt {

// Logs progress about once a second (bytes, seconds per GiB, how long it will take still) and, at the
// end, seconds per GiB. `progress`, which may be empty, gets the bytes done, from 0, never less than
// before, at least twice a second and at the end. ResourceExhausted. Cancelled within about a second
// of `should_stop`, saying so. Both are called on this thread.
absl::Status PopulateArena(Arena& arena, int threads, const std::function<bool()>& should_stop,
                           const std::function<void(uint64_t done_bytes)>& progress = nullptr);

}  // namespace kvt
