#include "tests/bench/burst_controls.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"

namespace kvt {
namespace {

constexpr uint32_t kRangesMax = 1024;  // IOV_MAX

struct Request {
  uint32_t count;
  uint32_t length;
};

absl::Status SocketError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("socket control: ", what, ": ", std::strerror(errno)));
}

// Moves all of the vector with `call` (readv or writev).
template <typename Call>
bool MoveAll(int fd, std::vector<iovec>& io, Call call) {
  size_t first = 0;
  while (first < io.size()) {
    const auto count = static_cast<int>(std::min<size_t>(io.size() - first, kRangesMax));
    ssize_t moved = call(fd, &io[first], count);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    while (moved > 0) {
      iovec& entry = io[first];
      const auto take = std::min<size_t>(entry.iov_len, static_cast<size_t>(moved));
      entry.iov_base = static_cast<char*>(entry.iov_base) + take;
      entry.iov_len -= take;
      moved -= static_cast<ssize_t>(take);
      if (entry.iov_len == 0) ++first;
    }
  }
  return true;
}

}  // namespace

void PinThisThread(int cpu) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  CPU_SET(cpu, &cpus);
  KVT_CHECK(pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus) == 0, "cpu ", cpu);
}

double CoreToCoreNs(int cpu_a, int cpu_b) {
  constexpr int kRounds = 20'000;
  alignas(128) std::atomic<int> ball{0};
  std::thread other([&] {
    PinThisThread(cpu_b);
    for (int i = 0; i < kRounds * 5; ++i) {
      while (ball.load(std::memory_order_acquire) != 2 * i + 1) {
      }
      ball.store(2 * i + 2, std::memory_order_release);
    }
  });
  double best = 1e9;
  std::thread self([&] {
    PinThisThread(cpu_a);
    for (int batch = 0; batch < 5; ++batch) {
      const absl::Time start = RealClock::Get().Now();
      for (int i = batch * kRounds; i < (batch + 1) * kRounds; ++i) {
        ball.store(2 * i + 1, std::memory_order_release);
        while (ball.load(std::memory_order_acquire) != 2 * i + 2) {
        }
      }
      const double ns = absl::ToDoubleNanoseconds(RealClock::Get().Now() - start) / kRounds / 2;
      best = std::min(best, ns);
    }
  });
  self.join();
  other.join();
  return best;
}

absl::StatusOr<std::unique_ptr<SocketServer>> SocketServer::Start(const std::byte* arena,
                                                                  uint64_t size, int cpu) {
  std::unique_ptr<SocketServer> server(new SocketServer);
  server->listener_ = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(server->listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(server->listener_.get(), 1) != 0 ||
      getsockname(server->listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return SocketError("listen");
  }
  server->port_ = ntohs(address.sin_port);
  server->thread_ =
      std::thread([raw = server.get(), arena, size, cpu] { raw->Run(arena, size, cpu); });
  return server;
}

SocketServer::~SocketServer() {
  (void)shutdown(listener_.get(), SHUT_RDWR);
  if (thread_.joinable()) thread_.join();
}

void SocketServer::Run(const std::byte* arena, uint64_t size, int cpu) {
  PinThisThread(cpu);
  UniqueFd peer(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!peer.valid()) return;
  const int one = 1;
  (void)setsockopt(peer.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  std::vector<uint64_t> offsets(kRangesMax);
  std::vector<iovec> io;
  while (true) {
    Request request;
    if (recv(peer.get(), &request, sizeof(request), MSG_WAITALL) != sizeof(request)) return;
    if (request.count == 0 || request.count > kRangesMax) return;
    const size_t bytes = request.count * sizeof(uint64_t);
    if (recv(peer.get(), offsets.data(), bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) return;
    io.clear();
    for (uint32_t i = 0; i < request.count; ++i) {
      if (offsets[i] + request.length > size) return;
      io.push_back({const_cast<std::byte*>(arena + offsets[i]), request.length});
    }
    if (!MoveAll(peer.get(), io, writev)) return;
  }
}

absl::StatusOr<std::unique_ptr<SocketClient>> SocketClient::Connect(int port) {
  auto client = std::make_unique<SocketClient>();
  client->socket_ = UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(client->socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    return SocketError("connect");
  }
  const int one = 1;
  (void)setsockopt(client->socket_.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return client;
}

absl::Status SocketClient::Pull(absl::Span<const uint64_t> offsets, uint32_t length,
                                absl::Span<std::byte* const> destinations) {
  std::vector<iovec> io;
  size_t asked = 0;
  for (size_t received = 0; received < offsets.size();) {
    // One request ahead of what is being received.
    while (asked < offsets.size() && asked < received + 2 * kRangesMax) {
      const size_t count = std::min<size_t>(offsets.size() - asked, kRangesMax);
      Request request{static_cast<uint32_t>(count), length};
      io.clear();
      io.push_back({&request, sizeof(request)});
      io.push_back({const_cast<uint64_t*>(&offsets[asked]), count * sizeof(uint64_t)});
      if (!MoveAll(socket_.get(), io, writev)) return SocketError("send");
      asked += count;
    }
    const size_t count = std::min<size_t>(offsets.size() - received, kRangesMax);
    io.clear();
    for (size_t i = 0; i < count; ++i) io.push_back({destinations[received + i], length});
    if (!MoveAll(socket_.get(), io, readv)) return SocketError("receive");
    received += count;
  }
  return absl::OkStatus();
}

}  // namespace kvt
