// What keeps a host from running a cluster: `kvtide doctor` says it beforehand, and the daemon refuses
// to start for the same cause, in time, leaving nothing behind. Limits are real ones, set for the
// programs under test (prlimit, setpriv, a mount namespace).
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/clock.h"
#include "kernels/base/random.h"
#include "kvstore/media/shared_mapping.h"
#include "tests/support/run_program.h"

namespace kvt {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr absl::Duration kFailsWithin = absl::Seconds(5);

using Words = std::vector<std::string>;

std::string Binary(const std::string& name) { return absl::StrCat(KVT_BINARY_DIR, "/bin/", name); }

Words Joined(Words first, const Words& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// One store's configuration in a folder of its own, also as a cluster of it.
class DoctorTest : public testing::Test {
 protected:
  DoctorTest()
      : folder_(absl::StrCat(testing::TempDir(), "doctor-", getpid(), "-",
                             Random::FromEntropy().Next())) {
    std::filesystem::create_directory(folder_);
    std::filesystem::create_directory(folder_ + "/left");
    std::ofstream(folder_ + "/key") << std::string(64, '7') << "\n";
  }
  ~DoctorTest() override { std::filesystem::remove_all(folder_); }

  // Keys of [node] and [store], one a line.
  void Configure(const std::string& node, const std::string& store) {
    std::ofstream(folder_ + "/store.toml")
        << "[node]\nname = \"store-0\"\n"
        << node << "\n[store]\n"
        << store << "\naddress_file = \"" << folder_ << "/left/address\"\nshm_socket = \"" << folder_
        << "/left/shm.sock\"\nticket_public_key_file = \"" << folder_ << "/key\"\n";
    std::ofstream(folder_ + "/cluster.toml")
        << "[cluster]\nmodel_folder = \"" << folder_ << "\"\n[node]\n"
        << node << "\n[[store]]\n"
        << store << "\n[[prefill]]\n[[decode]]\n";
  }
  // What the doctor says of the check, run with `wrapper` in front.
  nlohmann::json Ask(const std::string& node, const std::string& check, const Words& wrapper = {}) {
    const ProgramResult result =
        RunProgram(Joined(wrapper, {Binary("kvtide"), "doctor", "--run-dir", folder_ + "/run",
                                    "--config", folder_ + "/cluster.toml", "-o", "json"}),
                   "", kPatience);
    const auto json = nlohmann::json::parse(result.out, nullptr, false);
    EXPECT_TRUE(json.is_object()) << result.out << result.err;
    if (!json.is_object()) return {};
    EXPECT_EQ(result.code, json.value("fail", -1) == 0 ? 0 : 1);
    for (const auto& line : json["checks"]) {
      if (line["node"] == node && line["check"] == check) return line;
    }
    ADD_FAILURE() << node << ": " << check << " is not among\n" << result.out;
    return {};
  }
  // The doctor finds that the check fails, naming cause and remedy; the daemon refuses for it.
  void ExpectFailure(const std::string& check, const std::string& found, const std::string& remedy,
                     const Words& wrapper = {}) {
    const nlohmann::json line = Ask("store-0", check, wrapper);
    EXPECT_EQ(line.value("state", ""), "fail") << line;
    EXPECT_NE(line.value("found", "").find(found), std::string::npos) << line;
    EXPECT_NE(line.value("remedy", "").find(remedy), std::string::npos) << line;
    const absl::Time start = RealClock::Get().Now();
    const ProgramResult daemon = RunProgram(
        Joined(wrapper, {Binary("kvtide-store"), "--config", folder_ + "/store.toml"}), "", kPatience);
    EXPECT_LT(RealClock::Get().Now() - start, kFailsWithin);
    EXPECT_EQ(daemon.code, 1) << daemon.err;
    EXPECT_NE(daemon.err.find(found), std::string::npos) << daemon.err;
    EXPECT_TRUE(std::filesystem::is_empty(folder_ + "/left"));
  }

  const std::string folder_;
};

TEST_F(DoctorTest, F10_HealthyHost_NothingOfTheStoreFailsAndItStarts) {
  Configure("", "arena_bytes = \"4MiB\"\nucx_tls = \"tcp\"");
  for (const char* const check : {"ucx devices", "ucx transports", "locked memory", "memory",
                                  "file size limit", "listen", "ucx_listen", "spill folder", "gpu"}) {
    EXPECT_EQ(Ask("store-0", check).value("state", ""), "ok") << check;
  }
  Program daemon({Binary("kvtide-store"), "--config", folder_ + "/store.toml"});
  const absl::Time deadline = RealClock::Get().Now() + kPatience;
  while (!std::filesystem::exists(folder_ + "/left/address")) {
    ASSERT_LT(RealClock::Get().Now(), deadline);
    daemon.AwaitOutput(1, absl::Milliseconds(20));
  }
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Finish(kPatience).code, 0);
}

TEST_F(DoctorTest, F10_LockedMemoryLimitWithRdma_FailsNamingLimitAndRemedy) {
  Configure("", "arena_bytes = \"64MiB\"\nucx_tls = \"rc\"");
  Words wrapper;
  // Root has the capability that lifts the limit.
  if (geteuid() == 0) {
    wrapper = {"/usr/bin/setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"};
  }
  ExpectFailure("locked memory", "limit 64.0 KiB", "LimitMEMLOCK",
                Joined(wrapper, {"/usr/bin/prlimit", "--memlock=65536:65536"}));
}

TEST_F(DoctorTest, F10_FileSizeLimit_FailsNamingLimitAndRemedy) {
  Configure("", "arena_bytes = \"64MiB\"");
  ExpectFailure("file size limit", "limit 1.0 MiB", "LimitFSIZE",
                {"/usr/bin/prlimit", "--fsize=1048576:1048576"});
}

TEST_F(DoctorTest, F10_SmallDevShm_FailsNamingSizeAndRemedy) {
  const Words in_namespace = {
      "/usr/bin/unshare", "-m", "/bin/sh", "-c",
      "mount -t tmpfs -o size=1m kvtide-test /dev/shm && exec \"$@\"", "sh"};
  if (RunProgram(Joined(in_namespace, {"/bin/true"})).code != 0) {
    GTEST_SKIP() << "no mount namespace: needs root";
  }
  Configure("", "arena_bytes = \"4MiB\"\nucx_tls = \"all\"");
  ExpectFailure("/dev/shm", "1.0 MiB free of 1.0 MiB", "--shm-size", in_namespace);
  // The arena does not need it.
  Configure("", "arena_bytes = \"4MiB\"\nucx_tls = \"tcp\"");
  EXPECT_EQ(Ask("store-0", "/dev/shm", in_namespace).value("state", ""), "ok");
}

TEST_F(DoctorTest, F10_UnknownUcxDevice_FailsNamingThoseThatExist) {
  Configure("", "arena_bytes = \"4MiB\"\nucx_net_devices = \"nope0\"");
  ExpectFailure("ucx devices", "no network device 'nope0'", "ucx_net_devices");
  EXPECT_NE(Ask("store-0", "ucx devices").value("found", "").find("lo"), std::string::npos);
}

TEST_F(DoctorTest, F10_UnknownUcxDeviceOfWorkers_IsFound) {
  Configure("", "arena_bytes = \"4MiB\"");
  std::ofstream(folder_ + "/cluster.toml", std::ios::app) << "[tier]\nucx_net_devices = \"nope1\"\n";
  const nlohmann::json line = Ask("workers", "ucx devices");
  EXPECT_EQ(line.value("state", ""), "fail") << line;
  EXPECT_NE(line.value("found", "").find("nope1"), std::string::npos) << line;
}

TEST_F(DoctorTest, F10_UnknownUcxDeviceOfWorkers_KeepsThemFromStarting) {
  // Before the model is looked at, which would take its time.
  for (const char* const kind : {"prefill", "decode"}) {
    const std::string config = folder_ + "/" + kind + ".toml";
    std::ofstream(config) << "[node]\nname = \"w\"\n[tier]\nucx_net_devices = \"nope2\"\n[model]\nfolder = "
                          << "\"/nonexistent\"\n";
    const absl::Time start = RealClock::Get().Now();
    const ProgramResult daemon =
        RunProgram({Binary(absl::StrCat("kvtide-", kind)), "--config", config}, "", kPatience);
    EXPECT_LT(RealClock::Get().Now() - start, kFailsWithin);
    EXPECT_EQ(daemon.code, 1) << daemon.err;
    EXPECT_NE(daemon.err.find("no network device 'nope2'"), std::string::npos) << daemon.err;
  }
}

TEST_F(DoctorTest, F10_MissingUcxTransport_FailsNamingThoseThatExist) {
  Configure("", "arena_bytes = \"4MiB\"\nucx_tls = \"dc\"");
  ExpectFailure("ucx transports", "ucx_tls names dc", "ucx_tls");
}

TEST_F(DoctorTest, F10_ArenaBeyondMemory_FailsNamingBoth) {
  Configure("", "arena_bytes = \"16000GiB\"");
  ExpectFailure("memory", "16000.00 GiB of memory asked for", "arena_bytes");
}

TEST_F(DoctorTest, F10_PortTaken_FailsNamingIt) {
  const UniqueFd taken(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(taken.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(taken.get(), 1), 0);
  socklen_t size = sizeof(address);
  ASSERT_EQ(getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  Configure(absl::StrCat("listen = \"", port, "\""), "arena_bytes = \"4MiB\"");
  ExpectFailure("listen", port, "change listen");
  Configure("", absl::StrCat("arena_bytes = \"4MiB\"\nucx_listen = \"", port, "\""));
  ExpectFailure("ucx_listen", port, "change ucx_listen");
}

TEST_F(DoctorTest, F10_BadConfiguration_FailsNamingFileAndKey) {
  Configure("", "arena_bytez = 1");
  ExpectFailure("configuration", "store.arena_bytez: unknown key", "correct the file");
}

TEST_F(DoctorTest, F10_NoModel_IsFound) {
  Configure("", "arena_bytes = \"4MiB\"");
  const nlohmann::json line = Ask("cluster", "model folder");
  EXPECT_EQ(line.value("state", ""), "fail") << line;
  EXPECT_NE(line.value("found", "").find("config.json"), std::string::npos) << line;
}

}  // namespace
}  // namespace kvt
