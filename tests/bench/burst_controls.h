// What burst_bench compares with: a plain socket, a plain memcpy, one cache line between two cores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/media/shared_mapping.h"

namespace kvt {

void PinThisThread(int cpu);

// Nanoseconds a cache line takes from one core to the other: half a ping-pong, best of several.
double CoreToCoreNs(int cpu_a, int cpu_b);

// Sends scattered ranges of an arena with writev over one TCP connection of the loopback device.
class SocketServer {
 public:
  static absl::StatusOr<std::unique_ptr<SocketServer>> Start(const std::byte* arena, uint64_t size,
                                                             int cpu);
  ~SocketServer();
  [[nodiscard]] int port() const { return port_; }

 private:
  SocketServer() = default;
  void Run(const std::byte* arena, uint64_t size, int cpu);
  UniqueFd listener_;
  int port_ = 0;
  std::thread thread_;
};

// Asks for ranges, up to 1,024 a request with the next request sent ahead, and receives them with readv
// into scattered destinations.
class SocketClient {
 public:
  static absl::StatusOr<std::unique_ptr<SocketClient>> Connect(int port);
  absl::Status Pull(absl::Span<const uint64_t> offsets, uint32_t length,
                    absl::Span<std::byte* const> destinations);

 private:
  UniqueFd socket_;
};

}  // namespace kvt
