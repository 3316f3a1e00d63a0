// Which sequences step together (continuous batching): every running one, as long as a step has
// rows; else those that have waited longest. PURE.
//
// Thread-safety: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace kvt {

class BatchSchedule {
 public:
  // A sequence that can step. It joins behind those already there.
  void Add(uint64_t sequence);
  void Remove(uint64_t sequence);
  // The sequences of the next step, at most `rows_max`; they go to the back, in order.
  [[nodiscard]] std::vector<uint64_t> TakeBatch(int rows_max);
  [[nodiscard]] bool empty() const { return running_.empty(); }
  [[nodiscard]] size_t size() const { return running_.size(); }

 private:
  std::deque<uint64_t> running_;
};

}  // namespace kvt
