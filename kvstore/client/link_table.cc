#include "kvstore/client/link_table.h"

#include "kernels/base/log.h"

namespace kvt {

uint32_t LinkTable::Find(absl::string_view name) const {
  const uint32_t count = size();
  for (uint32_t i = 0; i < count; ++i) {
    if (links_[i]->name() == name) return i;
  }
  return kNoStore;
}

uint32_t LinkTable::FindOrAdd(const StoreRef& store) {
  const uint32_t found = Find(store.name);
  if (found != kNoStore) return found;
  MutexLock lock(mu_);
  const uint32_t again = Find(store.name);
  if (again != kNoStore) return again;
  const uint32_t index = size();
  if (index >= kClientStoresMax) {
    KVT_LOG(kError, "store ", store.name, " is ignored: more than ", kClientStoresMax, " stores");
    return kNoStore;
  }
  links_[index] = std::make_unique<StoreLink>(config_, store, calls_, clock_);
  size_.store(index + 1, std::memory_order_release);
  return index;
}

void LinkTable::CallStarted() {
  MutexLock lock(mu_);
  ++calls_open_;
}

void LinkTable::CallEnded() {
  MutexLock lock(mu_);
  --calls_open_;
  ended_.NotifyAll();
}

void LinkTable::Close() {
  for (uint32_t i = 0; i < size(); ++i) links_[i]->Close();
  MutexLock lock(mu_);
  while (calls_open_ > 0) ended_.WaitFor(mu_, absl::Seconds(1));
}

}  // namespace kvt
