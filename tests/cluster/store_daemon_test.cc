// kvtide-store as a process: what keeps it from starting, and how it stops.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "coordinator/coordinator_service.h"
#include "kernels/base/clock.h"
#include "kernels/base/random.h"
#include "kvstore/wire/wire_rpc.h"
#include "tests/support/store_testing.h"

namespace kvt {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);

// The daemon under a configuration; killed and reaped at its end.
class StoreProcess {
 public:
  explicit StoreProcess(const std::vector<std::string>& lines) {
    const std::string path = absl::StrCat(testing::TempDir(), "store-", getpid(), "-",
                                          Random::FromEntropy().Next(), ".toml");
    std::ofstream(path) << absl::StrJoin(lines, "\n") << "\n";
    int out[2];
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(out[1], STDERR_FILENO);
      dup2(out[1], STDOUT_FILENO);
      const std::string program = absl::StrCat(KVT_BINARY_DIR, "/bin/kvtide-store");
      execl(program.c_str(), program.c_str(), "--config", path.c_str(), nullptr);
      _exit(127);
    }
    close(out[1]);
    out_ = out[0];
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid_, 0));
  }
  ~StoreProcess() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(out_);
    close(pidfd_);
  }

  // Reads its output until `text` appears; everything read so far, or what it said until its end.
  std::string ReadUntil(const std::string& text) {
    const absl::Time deadline = RealClock::Get().Now() + kPatience;
    while (said_.find(text) == std::string::npos) {
      pollfd wait{out_, POLLIN, 0};
      const auto left = absl::ToInt64Milliseconds(deadline - RealClock::Get().Now());
      if (left <= 0 || poll(&wait, 1, static_cast<int>(left)) <= 0) break;
      char buffer[4096];
      const ssize_t n = read(out_, buffer, sizeof(buffer));
      if (n <= 0) break;
      said_.append(buffer, static_cast<size_t>(n));
    }
    return said_;
  }
  void Signal(int signal) { kill(pid_, signal); }
  // Its exit status; -1 when it has not ended by then.
  int Wait(absl::Duration timeout) {
    pollfd wait{pidfd_, POLLIN, 0};
    if (poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(timeout))) <= 0) return -1;
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }
  // The address behind "listening on ": the store is ready.
  std::string Address() { return AddressBehind("listening on ", ", data on"); }
  // The address behind "control on ": it may be starting still.
  std::string ControlAddress() { return AddressBehind("control on ", ", not ready"); }

 private:
  std::string AddressBehind(const std::string& before, const std::string& until) {
    const std::string said = ReadUntil(until);
    const size_t at = said.find(before);
    if (at == std::string::npos) return "";
    const size_t begin = at + before.size();
    return said.substr(begin, said.find(',', begin) - begin);
  }

  pid_t pid_ = -1;
  int out_ = -1;
  int pidfd_ = -1;
  std::string said_;
};

std::string KeyFile(const TicketMaker& tickets) {
  const std::string path = absl::StrCat(testing::TempDir(), "ticket-key-", getpid());
  std::ofstream(path) << absl::BytesToHexString(tickets.PublicKey()) << "\n";
  return path;
}

std::vector<std::string> Config(const std::vector<std::string>& node,
                                const std::vector<std::string>& store) {
  std::vector<std::string> lines = {"[node]", "name = \"store-t\""};
  lines.insert(lines.end(), node.begin(), node.end());
  lines.push_back("[store]");
  lines.insert(lines.end(), store.begin(), store.end());
  return lines;
}

TEST(StoreDaemon, BadStart_FailsAtOnceAndNamesTheCause) {  // F10
  const int taken = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(taken, 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(getsockname(taken, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  const std::string small = "arena_bytes = \"4MiB\"";
  struct Case {
    std::vector<std::string> config;
    std::string said;
  };
  const std::vector<Case> cases = {
      {Config({}, {"arena_bytez = 1"}), "store.arena_bytez: unknown key"},
      {Config({}, {"ucx = false", "shm = false"}), "at least one of ucx and shm"},
      {Config({}, {"arena_bytes = \"16000GiB\""}), "configure a smaller pool or free memory"},
      {Config({absl::StrCat("listen = \"", port, "\"")}, {small}), port},
      {Config({absl::StrCat("metrics_listen = \"", port, "\"")}, {small}), port},
      {Config({}, {small, absl::StrCat("ucx_listen = \"", port, "\"")}), port},
      {Config({}, {small, "shm_socket = \"/nonexistent/s.sock\""}), "/nonexistent/s.sock"},
      {Config({}, {small, "ticket_public_key_file = \"/nonexistent/key\""}), "/nonexistent/key"}};
  for (const Case& c : cases) {
    StoreProcess store(c.config);
    EXPECT_EQ(store.Wait(kPatience), 1) << c.said;
    const std::string said = store.ReadUntil("\a");  // all of it
    EXPECT_NE(said.find(c.said), std::string::npos) << c.said << " not in\n" << said;
  }
  close(taken);
}

TEST(StoreDaemon, Sigterm_EndsWithZeroWithinFiveSecondsUnderAHeldSession) {
  const TicketMaker tickets;
  StoreProcess store(Config({"metrics_listen = \"127.0.0.1:0\""},
                            {"arena_bytes = \"64MiB\"",
                             absl::StrCat("ticket_public_key_file = \"", KeyFile(tickets), "\"")}));
  const std::string address = store.Address();
  ASSERT_FALSE(address.empty()) << store.ReadUntil("\a");
  const auto api = ConnectStore(address, absl::Seconds(10));
  const auto session = api->OpenSession(TestOpen("w"));
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_FALSE(session->ucx_address.empty());
  EXPECT_FALSE(session->shm_socket.empty());
  ASSERT_TRUE(api->Reserve({session->session, tickets.Make(1), TestNames(4, 1), 3, {}}).ok());
  const auto stats = api->Stats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->name, "store-t");
  EXPECT_EQ(stats->capacity_bytes, 64u << 20);
  EXPECT_EQ(stats->reserved_bytes, 14u * TestGeometry().RecordBytes());
  const absl::Time asked = RealClock::Get().Now();
  store.Signal(SIGTERM);
  EXPECT_EQ(store.Wait(kPatience), 0);
  EXPECT_LT(RealClock::Get().Now() - asked, absl::Seconds(5));
  EXPECT_EQ(api->Stats().status().code(), absl::StatusCode::kUnavailable);
}

// A store of 2 GiB, populated by one thread, against a real coordinator: alive and seen from the first
// moment, given to nobody before it is ready.
TEST(StoreDaemon, F20_LargeArena_IsLiveAndShowsProgressBeforeItIsReady) {
  CoordinatorService coordinator(CoordinatorCoreOptions{}, RealClock::Get(), absl::Now(),
                                 TicketSigner::Generate());
  const auto server = ServeCoordinator(coordinator, "127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  StoreProcess store(
      Config({absl::StrCat("coordinator = \"127.0.0.1:", (*server)->port(), "\"")},
             {"arena_bytes = \"2GiB\"", "populate_threads = 1"}));
  const std::string address = store.ControlAddress();
  ASSERT_FALSE(address.empty()) << store.ReadUntil("\a");

  bool was_live_not_ready = false;
  bool was_starting = false;
  bool was_refused = false;
  const auto api = ConnectStore(address, absl::Seconds(10));
  const absl::Time deadline = RealClock::Get().Now() + kPatience;
  while (RealClock::Get().Now() < deadline) {
    coordinator.Tick();
    const auto health = CheckHealth(address, absl::Seconds(5));
    ASSERT_TRUE(health.ok()) << health.status();
    const auto status = coordinator.Status();
    ASSERT_TRUE(status.ok());
    const bool known = !status->nodes.empty();
    if (known && status->nodes[0].state == "starting") {
      was_starting = true;
      EXPECT_TRUE(coordinator.View()->stores.empty());
      EXPECT_LE(status->nodes[0].load.starting_percent, 100u);
    }
    if (*health == NodeHealth::kLiveNotReady) {
      was_live_not_ready = true;
      const absl::Status refused = api->OpenSession(TestOpen("w")).status();
      if (!refused.ok()) {
        was_refused = true;
        EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
        EXPECT_NE(refused.message().find("store-t is starting"), absl::string_view::npos);
      }
      EXPECT_TRUE(api->Stats().ok());  // figures are to be had before
    } else if (known && status->nodes[0].state == "ready") {
      break;
    }
  }
  EXPECT_TRUE(was_live_not_ready);
  EXPECT_TRUE(was_starting);
  EXPECT_TRUE(was_refused);
  EXPECT_EQ(coordinator.View()->stores.size(), 1u);
  EXPECT_TRUE(api->OpenSession(TestOpen("w")).ok());
  const std::string said = store.ReadUntil(", data on");
  EXPECT_NE(said.find("s per GiB"), std::string::npos) << said;
}

TEST(StoreDaemon, F20_SigtermWhileItStarts_EndsAtOnce) {
  const TicketMaker tickets;
  StoreProcess store(Config({}, {"arena_bytes = \"2GiB\"", "populate_threads = 1",
                                 absl::StrCat("ticket_public_key_file = \"", KeyFile(tickets),
                                              "\"")}));
  ASSERT_FALSE(store.ControlAddress().empty()) << store.ReadUntil("\a");
  store.Signal(SIGTERM);
  EXPECT_EQ(store.Wait(absl::Seconds(10)), 0);
  EXPECT_EQ(store.ReadUntil("\a").find(", data on"), std::string::npos);
}

}  // namespace
}  // namespace kvt
