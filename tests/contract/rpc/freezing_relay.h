// A TCP relay to one port that can stop forwarding without closing anything: to either side the other
// looks like a stopped process.
#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace kvt {

class FreezingRelay {
 public:
  explicit FreezingRelay(int to_port) : to_port_(to_port) {
    listener_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_, 8), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Forward(); });
  }
  ~FreezingRelay() {
    stop_ = true;
    thread_.join();
    for (const int fd : fds_) close(fd);
    close(listener_);
  }
  [[nodiscard]] int port() const { return port_; }
  void Freeze() { frozen_ = true; }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }
  // fds_ holds pairs: 2i is the client's end, 2i+1 the server's.
  void Forward() {
    char buffer[65536];
    while (!stop_) {
      std::vector<pollfd> watched = {{listener_, POLLIN, 0}};
      if (!frozen_) {
        for (const int fd : fds_) watched.push_back({fd, POLLIN, 0});
      }
      if (poll(watched.data(), watched.size(), 20) <= 0) continue;
      for (size_t i = 1; i < watched.size(); ++i) {
        if (watched[i].revents == 0) continue;
        const ssize_t got = recv(watched[i].fd, buffer, sizeof buffer, 0);
        const int other = fds_[(i - 1) ^ 1];
        if (got > 0) {
          (void)!send(other, buffer, static_cast<size_t>(got), MSG_NOSIGNAL);
        } else {
          shutdown(other, SHUT_RDWR);
        }
      }
      if (watched[0].revents != 0) Accept();
    }
  }
  void Accept() {
    const int client = accept(listener_, nullptr, nullptr);
    const int server = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = Loopback(to_port_);
    if (client < 0 || connect(server, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      if (client >= 0) close(client);
      close(server);
      return;
    }
    fds_.push_back(client);
    fds_.push_back(server);
  }

  const int to_port_;
  int listener_ = -1;
  int port_ = 0;
  std::vector<int> fds_;
  std::atomic<bool> frozen_{false};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace kvt
