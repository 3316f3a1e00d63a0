// In which order admitted sequences pull their blocks: small ones first, because they start sooner,
// with ageing, so that nobody waits for ever. PURE.
//
// A sequence of b bytes that has waited t counts b - t * kAgeingBytesPerSecond; the least goes first.
// So a long one is overtaken only by those that are smaller by more than it has aged.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "kernels/base/units.h"

namespace kvt {

// A quarter of what a slow link carries: one second's wait makes up for so many bytes.
inline constexpr double kAgeingBytesPerSecond = 64.0 * static_cast<double>(kMiB);

class PullSchedule {
 public:
  // At most `pulls_max` at once.
  explicit PullSchedule(int pulls_max) : pulls_max_(pulls_max) {}

  void Add(uint64_t sequence, uint64_t bytes, absl::Time now);
  // A sequence that was cancelled while it waited. One that pulls: use Finished.
  void Remove(uint64_t sequence);
  // The next to pull; it counts as pulling until Finished.
  [[nodiscard]] std::optional<uint64_t> Start();
  void Finished();
  [[nodiscard]] size_t waiting() const { return waiting_.size(); }

 private:
  struct Entry {
    uint64_t sequence;
    double rank;  // bytes plus the ageing that had passed at arrival: order never changes later
  };
  const int pulls_max_;
  int pulling_ = 0;
  std::vector<Entry> waiting_;
};

}  // namespace kvt
