// The stores that a TierClient has ever been told of, numbered from 0 in order of appearance.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/base/mutex.h"
#include "kvstore/client/store_link.h"

namespace kvt {

// Stores of one client over its life.
inline constexpr int kClientStoresMax = 256;
static_assert(kClientStoresMax <= kTransportChannelsMax);

// Thread-safe; Get takes no lock. Links live as long as the table.
class LinkTable {
 public:
  // The arguments outlive the table.
  LinkTable(const TierClientConfig& config, CallPool& calls, const Clock& clock)
      : config_(config), calls_(calls), clock_(clock) {}

  [[nodiscard]] uint32_t size() const { return size_.load(std::memory_order_acquire); }
  // Null for kNoStore and numbers not given out.
  [[nodiscard]] StoreLink* Get(uint32_t store) const {
    return store < size() ? links_[store].get() : nullptr;
  }
  [[nodiscard]] uint32_t Find(absl::string_view name) const;  // kNoStore when unknown
  // kNoStore when the table is full.
  uint32_t FindOrAdd(const StoreRef& store);

  // Calls on the call pool that use links and that nobody may be waiting for any more.
  void CallStarted();
  void CallEnded();
  // Closes every link, and returns when those calls have ended (each has a deadline).
  void Close();

 private:
  const TierClientConfig& config_;
  CallPool& calls_;
  const Clock& clock_;
  Mutex mu_;  // serialises additions
  CondVar ended_;
  int calls_open_ ABSL_GUARDED_BY(mu_) = 0;
  std::atomic<uint32_t> size_{0};
  std::array<std::unique_ptr<StoreLink>, kClientStoresMax> links_;
};

}  // namespace kvt
