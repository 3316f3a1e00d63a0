// The same scattered blocks pulled by kvtide and by what a user would take instead (Mooncake Transfer
// Engine, NIXL, Redis), in the same run on the same machine, interleaved round by round.
//
//   peers_bench --drivers DIR --python PROGRAM [--rounds N] [--json FILE] [--only CASE]
//
// Everyone gets the offsets of our store's records and the same places in a pool of 512 MiB, and is
// measured twice a round: both ends bound to a processor each, and free; the better of the two counts.
// Who is not measured is stopped (SIGSTOP). Ours verifies checksums, the others have none.
// KVT_REDIS_SERVER: redis-server's path.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "tests/bench/bench_pulls.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/bench_store.h"
#include "tests/bench/peer_process.h"

namespace kvt {
namespace {

constexpr uint64_t kPoolBytes = 512 * kMiB;
constexpr uint64_t kArenaMib = 1024;

struct BenchOptions {
  int rounds = 7;
  std::string json;
  std::string only;
  std::string drivers;
  std::string python;
};

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  KVT_CHECK(value.ok(), value.status().ToString());
  return std::move(*value);
}

absl::Time In(absl::Duration d) { return RealClock::Get().Now() + d; }

enum class Path { kTcp, kLocal };

struct PeerSpec {
  std::string name;
  Path path;
  std::vector<std::string> command;  // driver file, options
  std::vector<std::pair<std::string, std::string>> environment;
};

// What runs: ours or a peer. Rates in GB/s by round, bound and free.
struct Contender {
  std::string name;
  Path path = Path::kTcp;
  std::unique_ptr<PeerProcess> peer;  // null: ours
  std::vector<double> bound, free;
  [[nodiscard]] bool ran() const { return !bound.empty() && !free.empty(); }
  [[nodiscard]] const std::vector<double>& best() const {
    return Median(bound) >= Median(free) ? bound : free;
  }
};

std::vector<PeerSpec> Specs(const BenchOptions& options) {
  const std::string folder = options.drivers + "/";
  const std::pair<std::string, std::string> tcp{"UCX_TLS", "tcp"};
  const std::pair<std::string, std::string> lo{"UCX_NET_DEVICES", "lo"};
  std::vector<PeerSpec> specs = {
      {"mooncake_tcp", Path::kTcp, {folder + "mooncake_peer.py"}, {}},
      {"mooncake_pool_tcp",
       Path::kTcp,
       {folder + "mooncake_peer.py"},
       {{"MC_TCP_ENABLE_CONNECTION_POOL", "1"}}},
      {"nixl_tcp", Path::kTcp, {folder + "nixl_peer.py"}, {tcp, lo}},
      {"nixl_local",
       Path::kLocal,
       {folder + "nixl_peer.py"},
       {{"UCX_TLS", ""}, {"UCX_NET_DEVICES", ""}}},
      {"redis_tcp", Path::kTcp, {folder + "redis_peer.py"}, {}},
      {"redis_unix", Path::kLocal, {folder + "redis_peer.py", "--unix"}, {}},
  };
  for (PeerSpec& spec : specs) spec.command.insert(spec.command.begin(), options.python);
  return specs;
}

void WritePlan(const std::string& path, const PullSet& set, const std::byte* pool) {
  std::ofstream out(path);
  out << "{\"piece\":" << set.piece_bytes() << ",\"bursts\":[";
  for (uint32_t b = 0; b < set.bursts(); ++b) {
    out << (b > 0 ? "," : "") << "{\"src\":[";
    const auto offsets = set.Offsets(b);
    for (size_t i = 0; i < offsets.size(); ++i) out << (i > 0 ? "," : "") << offsets[i];
    out << "],\"dst\":[";
    const auto destinations = set.Destinations(b);
    for (size_t i = 0; i < destinations.size(); ++i) {
      out << (i > 0 ? "," : "") << destinations[i] - pool;
    }
    out << "]}";
  }
  out << "]}\n";
  out.close();
  KVT_CHECK(out.good(), path);
}

class PeersBench {
 public:
  explicit PeersBench(const BenchOptions& options) : options_(options) {
    for (const char* const name : {"kvtide_tcp", "kvtide_shm"}) {
      Contender ours;
      ours.name = name;
      ours.path = ours.name == "kvtide_tcp" ? Path::kTcp : Path::kLocal;
      contenders_.push_back(std::move(ours));
    }
    for (const PeerSpec& spec : Specs(options)) {
      Contender contender;
      contender.name = spec.name;
      contender.path = spec.path;
      contender.peer = std::make_unique<PeerProcess>(spec.command, spec.environment);
      if (!contender.peer->status().ok()) {
        std::printf("%s cannot run: %s\n", spec.name.c_str(),
                    std::string(contender.peer->status().message()).c_str());
      }
      contender.peer->Stop();
      contenders_.push_back(std::move(contender));
    }
    std::fflush(stdout);
  }

  void RunCase(const std::string& name);
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }

 private:
  // Seconds of one run of the set.
  static double RunOurs(Channel& channel, PullSet& set) {
    const absl::Time start = RealClock::Get().Now();
    (void)RunPulls(channel, set, {});
    return absl::ToDoubleSeconds(RealClock::Get().Now() - start);
  }
  void Round(BenchStore& store, Channel& tcp, Channel& shm, PullSet& set, bool pinned, bool counts);
  void LoadPeers(const std::string& plan);
  void Report(const std::string& name, const PullSet& set);
  void AddRatio(const Contender& ours, const Contender& theirs, const std::string& row);

  const BenchOptions& options_;
  std::vector<Contender> contenders_;
  std::vector<Row> rows_;
};

void PeersBench::LoadPeers(const std::string& plan) {
  for (Contender& contender : contenders_) {
    contender.bound.clear();
    contender.free.clear();
    if (contender.peer == nullptr || !contender.peer->status().ok()) continue;
    contender.peer->Continue();
    absl::Status status = contender.peer->Load(plan);
    if (status.ok()) status = contender.peer->Run().status();
    if (status.ok()) status = contender.peer->Check();
    if (!status.ok()) {
      std::printf("%s cannot run: %s\n", contender.name.c_str(),
                  std::string(status.message()).c_str());
    }
    contender.peer->Stop();
  }
}

void PeersBench::Round(BenchStore& store, Channel& tcp, Channel& shm, PullSet& set, bool pinned,
                       bool counts) {
  for (Contender& contender : contenders_) {
    if (contender.peer != nullptr && !contender.peer->status().ok()) continue;
    PeerProcess* const peer = contender.peer.get();
    absl::Status status;
    double seconds = 0;
    if (peer == nullptr) {
      store.Bind(pinned);
      BindProcess(getpid(), pinned ? kWorkerCpu : -1);
      Channel& channel = contender.path == Path::kTcp ? tcp : shm;
      (void)RunOurs(channel, set);
      seconds = LeastDisturbedSeconds([&] { return RunOurs(channel, set); },
                                      [&] { return store.Waited(); });
    } else {
      peer->Continue();
      peer->Bind(pinned);
      status = peer->Run().status();  // awake again
      seconds = LeastDisturbedSeconds(
          [&] {
            const absl::StatusOr<double> run = peer->Run();
            status.Update(run.status());
            return run.value_or(1);
          },
          [&] { return peer->Waited(); });
      peer->Stop();
      if (!status.ok()) {
        std::printf("%s failed: %s\n", contender.name.c_str(),
                    std::string(status.message()).c_str());
        continue;
      }
    }
    if (!counts) continue;
    (pinned ? contender.bound : contender.free)
        .push_back(static_cast<double>(set.bytes()) / seconds / 1e9);
  }
}

void PeersBench::RunCase(const std::string& name) {
  const SizeCase& size = CaseOf(name);
  StoreSettings settings;
  settings.pinned = false;
  settings.arena_mib = kArenaMib;
  BenchStore store(size, settings);
  PrivateMapping pool = OrDie(PrivateMapping::Create(kPoolBytes, SharedMappingOptions{}));
  PullSet set(size, store, {pool.data(), pool.size()},
              {.burst_pieces = size.whole ? 16u : 512u,
               .bursts = size.whole ? 1u : std::max(1u, (32u << 20) / 512 / size.PieceBytes())});
  const std::string plan = absl::StrCat("/tmp/kvt-peers-", getpid(), ".json");
  WritePlan(plan, set, pool.data());
  LoadPeers(plan);
  unlink(plan.c_str());
  auto ucx_transport = OrDie(MakeUcxTransport(UcxOf(settings, -1)));
  auto ucx = OrDie(ucx_transport->Connect(store.ucx, store.token, In(absl::Seconds(20))));
  auto shm_transport = MakeShmTransport(ShmOptions{});
  auto shm = OrDie(shm_transport->Connect(store.shm, store.token, In(absl::Seconds(20))));
  for (Channel* const channel : {ucx.get(), shm.get()}) {
    set.Wipe();
    (void)RunPulls(*channel, set, {});
    set.Verify();
  }
  for (int round = -1; round < options_.rounds; ++round) {
    for (const bool pinned : {true, false}) {
      Round(store, *ucx, *shm, set, pinned, /*counts=*/round >= 0);
    }
  }
  Report(name, set);
}

void PeersBench::AddRatio(const Contender& ours, const Contender& theirs, const std::string& row) {
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(ours.best().size(), theirs.best().size()); ++i) {
    ratios.push_back(ours.best()[i] / theirs.best()[i]);
  }
  std::printf("  %-28s %6.2f   (quartiles %.2f to %.2f; against %s)\n", row.c_str(), Median(ratios),
              Quantile(ratios, 0.25), Quantile(ratios, 0.75), theirs.name.c_str());
  rows_.push_back({row, Median(ratios), "ratio"});
}

void PeersBench::Report(const std::string& name, const PullSet& set) {
  std::printf("%s: %u pieces a burst, %u bursts a run, GB/s: both ends bound, free (quartiles)\n",
              name.c_str(), set.burst_pieces(), set.bursts());
  const Contender* best_peer = nullptr;
  for (const Contender& contender : contenders_) {
    if (!contender.ran()) continue;
    std::printf("  %-28s %6.2f (%.2f to %.2f)  %6.2f (%.2f to %.2f)\n", contender.name.c_str(),
                Median(contender.bound), Quantile(contender.bound, 0.25),
                Quantile(contender.bound, 0.75), Median(contender.free),
                Quantile(contender.free, 0.25), Quantile(contender.free, 0.75));
    rows_.push_back({absl::StrCat(contender.name, "_", name, "_gb_per_s"),
                     Median(contender.best()), "GB/s"});
    if (contender.peer == nullptr || contender.path != Path::kTcp) continue;
    if (best_peer == nullptr || Median(contender.best()) > Median(best_peer->best())) {
      best_peer = &contender;
    }
  }
  if (best_peer != nullptr) {
    AddRatio(contenders_[0], *best_peer, absl::StrCat("tcp_", name, "_vs_best_peer"));
  }
  for (const Contender& contender : contenders_) {
    if (contender.name != "nixl_local" || !contender.ran()) continue;
    AddRatio(contenders_[1], contender, absl::StrCat("shm_", name, "_vs_nixl"));
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  int exit_status = 0;
  if (kvt::MaybeStoreMain(argc, argv, &exit_status)) return exit_status;
  kvt::BenchOptions options;
  bool good = argc % 2 == 1;
  for (int i = 1; good && i < argc; i += 2) {
    const std::string key = argv[i];
    const std::string value = argv[i + 1];
    if (key == "--json") {
      options.json = value;
    } else if (key == "--only") {
      options.only = value;
    } else if (key == "--drivers") {
      options.drivers = value;
    } else if (key == "--python") {
      options.python = value;
    } else {
      good = key == "--rounds" && absl::SimpleAtoi(value, &options.rounds) && options.rounds > 0;
    }
  }
  if (!good || options.drivers.empty() || options.python.empty()) {
    std::fprintf(stderr,
                 "usage: peers_bench --drivers DIR --python PROGRAM [--rounds N] [--json FILE] "
                 "[--only CASE]\n");
    return 2;
  }
  if (sysconf(_SC_NPROCESSORS_ONLN) < 2) {
    std::fprintf(stderr, "peers_bench: needs two processors\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  kvt::PeersBench bench(options);
  for (const char* const name : {"8k", "12k", "64k", "16m"}) {
    if (options.only.empty() || options.only == name) bench.RunCase(name);
  }
  return kvt::WriteRows(options.json, bench.rows()) ? 0 : 1;
}
