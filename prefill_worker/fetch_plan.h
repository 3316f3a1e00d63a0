// Whether to fetch stored KV or to compute it again (FIELD-CASES F21). PURE.
//
// What a prompt reuses comes from sources: (store, medium) pairs, which deliver side by side, each at
// its measured rate. Tokens that are not fetched are computed after the fetch, at the measured rate
// of prefill. For a set F of sources that are fetched the first token waits for
//
//     max over F of bytes / rate  +  sum over the others of tokens / prefill rate
//
// and the set with the least of it is taken: among the sources in order of their time it is a
// leading part. A source without a measured rate is fetched, which measures it; with an unknown
// prefill rate everything is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace kvt {

enum class FetchMedium : uint8_t { kMemory = 0, kDisk = 1 };

struct FetchSource {
  FetchMedium medium = FetchMedium::kMemory;
  std::string store;
  uint64_t tokens = 0;  // of the blocks that lie there
  uint64_t bytes = 0;
  double bytes_per_s = 0;  // measured; 0: not known
};

struct FetchDecision {
  std::vector<bool> fetch;  // by source
  uint64_t declined_tokens = 0;
  // For people, empty when nothing is declined: "disk of store-0: 12.0 ms to fetch, 8.1 ms to compute".
  std::string declined;
};

[[nodiscard]] FetchDecision DecideFetch(absl::Span<const FetchSource> sources,
                                        double prefill_tokens_per_s);

}  // namespace kvt
