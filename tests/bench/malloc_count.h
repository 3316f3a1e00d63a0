// Counts this process's allocations while it is told to: calls of malloc and its kin by the vendor's
// library (UCX) apart from all others, which are ours. Linking malloc_count.cc puts counting wrappers
// before the C library's functions and operator new. Thread-safe.
#pragma once

#include <cstdint>

namespace kvt {

struct MallocCounts {
  uint64_t ours = 0;
  uint64_t vendor = 0;
};

// Starts from zero.
void StartMallocCount();
// What came since StartMallocCount. With KVT_BENCH_ALLOCATIONS=1 in the environment the first calls
// of ours were printed with their stacks.
MallocCounts StopMallocCount();

}  // namespace kvt
