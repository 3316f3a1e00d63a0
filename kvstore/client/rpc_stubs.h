// Stubs of peers by address, made once each. Bounded: an address that was not asked for lately gives
// way. Thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/base/mutex.h"

namespace kvt {

inline constexpr size_t kRpcStubsMax = 64;

template <typename Api>
class RpcStubs {
 public:
  using Connect = std::function<std::unique_ptr<Api>(const std::string& address)>;
  explicit RpcStubs(Connect connect) : connect_(std::move(connect)) {}

  std::shared_ptr<Api> Get(const std::string& address) {
    MutexLock lock(mu_);
    for (auto it = stubs_.begin(); it != stubs_.end(); ++it) {
      if (it->first != address) continue;
      auto found = std::move(*it);
      stubs_.erase(it);
      stubs_.push_back(std::move(found));
      return stubs_.back().second;
    }
    if (stubs_.size() >= kRpcStubsMax) stubs_.pop_front();
    stubs_.emplace_back(address, connect_(address));
    return stubs_.back().second;
  }

 private:
  const Connect connect_;
  Mutex mu_;
  std::deque<std::pair<std::string, std::shared_ptr<Api>>> stubs_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvt
