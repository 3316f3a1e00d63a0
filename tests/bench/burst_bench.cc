// Bursts of scattered pieces through the production transports and a StoreNode, beside what they are
// to be compared with, interleaved in the same run: the raw ceiling of the link, a plain socket, one
// piece at a time; for shared memory a plain memcpy gather. Store and worker are two processes on two
// cores.
//
//   burst_bench [--rounds N] [--json FILE] [--poll US] [--only CASE|base]
//
// Ours verifies checksums unless a row says otherwise. base_pull_time_share: time of BASE pulls over
// TARGET pulls of equal block counts; burst.sh runs that part again on a link held to a rate.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kvstore/transport/ucx_link_probe.h"
#include "tests/bench/bench_pulls.h"
#include "tests/bench/bench_rows.h"
#include "tests/bench/bench_store.h"
#include "tests/bench/burst_controls.h"

namespace kvt {
namespace {

constexpr uint32_t kBurstPieces = 512;
constexpr uint32_t kLargeBurstPieces = 40'000;
constexpr uint32_t kSinglePulls = 4'000;
constexpr uint32_t kIdlePulls = 400;
constexpr uint32_t kSingleBatch = 50;
constexpr absl::Duration kIdlePause = absl::Milliseconds(2);
constexpr uint64_t kCeilingMessages = 48;

struct BenchOptions {
  int rounds = 11;
  std::string json;
  std::string only;
  StoreSettings settings;
};

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  KVT_CHECK(value.ok(), value.status().ToString());
  return std::move(*value);
}

absl::Time In(absl::Duration d) { return RealClock::Get().Now() + d; }

// A store, the worker's channels to it, and the destinations.
struct Rig {
  Rig(const SizeCase& size, const StoreSettings& settings, uint64_t pool_bytes)
      : store(size, settings),
        pool(OrDie(PrivateMapping::Create(pool_bytes, SharedMappingOptions{}))),
        arena(store.MapArena()) {
    ucx_transport = OrDie(MakeUcxTransport(UcxOf(settings, kWorkerCpu)));
    ucx = OrDie(ucx_transport->Connect(store.ucx, store.token, In(absl::Seconds(20))));
    ShmOptions shm_options;
    shm_options.cpu = kWorkerCpu;
    shm_transport = MakeShmTransport(shm_options);
    shm = OrDie(shm_transport->Connect(store.shm, store.token, In(absl::Seconds(20))));
    probe = OrDie(ConnectUcxLinkProbe(UcxOf(settings, kWorkerCpu), store.probe));
    socket = OrDie(SocketClient::Connect(store.socket_port));
  }
  absl::Span<std::byte> Pool() const { return {pool.data(), pool.size()}; }

  BenchStore store;
  PrivateMapping pool;
  SharedMapping arena;
  std::unique_ptr<Transport> ucx_transport, shm_transport;
  std::unique_ptr<Channel> ucx, shm;
  std::unique_ptr<UcxLinkProbe> probe;
  std::unique_ptr<SocketClient> socket;
};

// Time in Channel::Pull as a share of the whole, by way.
struct PostingShare {
  double posting = 0;
  double total = 0;
  [[nodiscard]] double share() const { return posting / total; }
};

class CaseRun {
 public:
  CaseRun(const SizeCase& size, const BenchOptions& options, std::vector<Row>& rows)
      : size_(size),
        options_(options),
        rows_(rows),
        rig_(size, options.settings, kLargeBurstPieces * uint64_t{size.geometry().SlotBytes()}),
        small_(size, rig_.store, rig_.Pool(),
               {.burst_pieces = kBurstPieces, .bursts = static_cast<uint32_t>(size.bursts)}),
        large_(size, rig_.store, rig_.Pool(), {.burst_pieces = kLargeBurstPieces, .bursts = 1}) {}

  void Run() {
    AddSmallWays();
    AddLargeWays();
    Verify(small_ways_, small_);
    Verify(large_ways_, large_);
    const auto cpu = [this] { return rig_.store.CpuSeconds(); };
    const auto waited = [this] { return rig_.store.Waited(); };
    std::vector<double> core;
    for (int round = 0; round < options_.rounds; ++round) {
      core.push_back(CoreToCoreNs(kStoreCpu, kWorkerCpu));
      for (Way& way : small_ways_) Measure(way, cpu, waited);
      if (round % 2 != 0) continue;  // half as many rounds of the long ones
      for (Way& way : large_ways_) Measure(way, cpu, waited);
    }
    std::printf(
        "%s pieces, %u per burst, %u bursts a measurement, %d rounds, core to core %.0f ns, %llu records "
        "of neighbours on disk\n",
        size_.name.c_str(), kBurstPieces, small_.bursts(), options_.rounds, Median(core),
        static_cast<unsigned long long>(rig_.store.spilled_records));
    PrintWays(small_ways_);
    AddSmallRatios();
    std::printf("%s pieces, %u per burst\n", size_.name.c_str(), kLargeBurstPieces);
    PrintWays(large_ways_);
    AddLargeRatios();
    if (size_.name == "8k") {
      rows_.push_back({"core_to_core_ns", Median(core), "ns"});
      Singles();
    }
    CountAllocations();
    std::fflush(stdout);
  }
  [[nodiscard]] const PostingShare& tcp_posting() const { return tcp_posting_; }
  [[nodiscard]] const PostingShare& shm_posting() const { return shm_posting_; }

 private:
  void Add(std::vector<Way>& ways, std::string name, uint64_t bytes, std::function<void()> run) {
    Way way;
    way.name = std::move(name);
    way.bytes = bytes;
    way.run = std::move(run);
    ways.push_back(std::move(way));
  }
  std::function<void()> Pulls(Channel& channel, PullSet& set, bool checked, PostingShare* posting) {
    return [&channel, &set, checked, posting] {
      const absl::Time start = RealClock::Get().Now();
      const absl::Duration in_pull = RunPulls(channel, set, {.checked = checked});
      if (posting == nullptr) return;
      posting->posting += absl::ToDoubleSeconds(in_pull);
      posting->total += absl::ToDoubleSeconds(RealClock::Get().Now() - start);
    };
  }
  std::function<void()> Socket(PullSet& set) {
    return [this, &set] {
      for (uint32_t b = 0; b < set.bursts(); ++b) {
        const absl::Status status =
            rig_.socket->Pull(set.Offsets(b), set.piece_bytes(), set.Destinations(b));
        KVT_CHECK(status.ok(), status.ToString());
      }
    };
  }
  std::function<void()> Memcpy(PullSet& set) {
    return [this, &set] {
      for (uint32_t b = 0; b < set.bursts(); ++b) {
        const auto offsets = set.Offsets(b);
        const auto destinations = set.Destinations(b);
        for (size_t i = 0; i < offsets.size(); ++i) {
          std::memcpy(destinations[i], rig_.arena.data() + offsets[i], set.piece_bytes());
        }
      }
    };
  }
  std::function<void()> Ceiling(LinkProbeProtocol protocol) {
    return [this, protocol] {
      LinkProbeOptions probe;
      probe.messages = kCeilingMessages;
      probe.protocol = protocol;
      (void)OrDie(rig_.probe->Measure(probe, In(absl::Seconds(60))));
    };
  }

  void AddSmallWays() {
    const uint64_t bytes = small_.bytes();
    const uint64_t one_by_one = kBurstPieces * uint64_t{small_.piece_bytes()};
    const uint64_t ceiling_bytes = kCeilingMessages * 4 * kMiB;
    Add(small_ways_, "ceiling rendezvous", ceiling_bytes, Ceiling(LinkProbeProtocol::kRendezvous));
    Add(small_ways_, "ceiling eager", ceiling_bytes, Ceiling(LinkProbeProtocol::kEager));
    Add(small_ways_, "tcp", bytes, Pulls(*rig_.ucx, small_, true, &tcp_posting_));
    Add(small_ways_, "socket", bytes, Socket(small_));
    Add(small_ways_, "tcp unchecked", bytes, Pulls(*rig_.ucx, small_, false, nullptr));
    Add(small_ways_, "one by one", one_by_one, [this] {
      (void)RunPulls(*rig_.ucx, small_, {.pieces = 1, .total = kBurstPieces});
    });
    Add(small_ways_, "one by one, 32", one_by_one * 2, [this] {
      (void)RunPulls(*rig_.ucx, small_, {.pieces = 1, .outstanding = 32, .total = 2 * kBurstPieces});
    });
    Add(small_ways_, "memcpy", bytes, Memcpy(small_));
    Add(small_ways_, "shm", bytes, Pulls(*rig_.shm, small_, true, &shm_posting_));
    Add(small_ways_, "shm unchecked", bytes, Pulls(*rig_.shm, small_, false, nullptr));
  }
  void AddLargeWays() {
    const uint64_t bytes = large_.bytes();
    Add(large_ways_, "tcp", bytes, Pulls(*rig_.ucx, large_, true, &tcp_posting_));
    Add(large_ways_, "socket", bytes, Socket(large_));
    Add(large_ways_, "memcpy", bytes, Memcpy(large_));
    Add(large_ways_, "shm", bytes, Pulls(*rig_.shm, large_, true, &shm_posting_));
  }
  // Each way once unmeasured, its bytes verified.
  static void Verify(std::vector<Way>& ways, PullSet& set) {
    for (Way& way : ways) {
      const bool whole = way.bytes == set.bytes();
      if (whole) set.Wipe();
      way.run();
      if (whole) set.Verify();
    }
  }

  void AddSmallRatios() {
    const bool eager = Median(FindWay(small_ways_, "ceiling eager")->gbps) >
                       Median(FindWay(small_ways_, "ceiling rendezvous")->gbps);
    const std::string best = eager ? "ceiling eager" : "ceiling rendezvous";
    const std::string& n = size_.name;
    AddRatio(small_ways_, "tcp", "socket", "tcp_" + n + "_vs_socket", rows_);
    AddRatio(small_ways_, "tcp", best, "tcp_" + n + "_vs_ceiling", rows_);
    AddRatio(small_ways_, "tcp", "one by one", "tcp_" + n + "_vs_one_by_one", rows_);
    AddRatio(small_ways_, "tcp", "one by one, 32", "tcp_" + n + "_vs_one_by_one_32", rows_);
    AddRatio(small_ways_, "tcp", "tcp unchecked", "tcp_" + n + "_checksum_vs_off", rows_);
    AddRatio(small_ways_, "shm", "memcpy", "shm_" + n + "_vs_memcpy", rows_);
    AddRatio(small_ways_, "shm", "shm unchecked", "shm_" + n + "_checksum_vs_off", rows_);
  }
  void AddLargeRatios() {
    const std::string n = size_.name + "_40000";
    AddRatio(large_ways_, "tcp", "socket", "tcp_" + n + "_vs_socket", rows_);
    AddRatio(large_ways_, "shm", "memcpy", "shm_" + n + "_vs_memcpy", rows_);
    // The ceiling of the same rounds, over other bytes: medians.
    const double ceiling = std::max(Median(FindWay(small_ways_, "ceiling eager")->gbps),
                                    Median(FindWay(small_ways_, "ceiling rendezvous")->gbps));
    rows_.push_back({"tcp_" + n + "_vs_ceiling",
                     Median(FindWay(large_ways_, "tcp")->gbps) / ceiling, "ratio"});
    std::printf("  %-28s %6.2f\n", rows_.back().name.c_str(), rows_.back().value);
  }

  void Singles() {
    const auto report = [this](const std::string& name, const std::vector<double>& times) {
      rows_.push_back({name + "_p50_us", Quantile(times, 0.50), "us"});
      rows_.push_back({name + "_p99_us", Quantile(times, 0.99), "us"});
      std::printf("  %-28s p50 %.1f us, p99 %.1f us\n", name.c_str(), Quantile(times, 0.50),
                  Quantile(times, 0.99));
    };
    report("single_8k", LeastDisturbedSingles(*rig_.ucx, kSinglePulls, absl::ZeroDuration()));
    report("single_8k_asleep", LeastDisturbedSingles(*rig_.ucx, kIdlePulls, kIdlePause));
    report("shm_single_8k", LeastDisturbedSingles(*rig_.shm, kSinglePulls, absl::ZeroDuration()));
  }
  // Twice as many pulls in batches; the half of the batches that waited least for a processor.
  std::vector<double> LeastDisturbedSingles(Channel& channel, uint32_t count,
                                            absl::Duration pause) {
    std::vector<std::pair<double, std::vector<double>>> batches;
    (void)SinglePullMicroseconds(channel, small_, kSingleBatch, pause);
    for (uint32_t i = 0; i < 2 * count / kSingleBatch; ++i) {
      const double before = rig_.store.Waited();
      std::vector<double> times = SinglePullMicroseconds(channel, small_, kSingleBatch, pause);
      batches.emplace_back(rig_.store.Waited() - before, std::move(times));
    }
    std::sort(batches.begin(), batches.end());
    std::vector<double> all;
    for (size_t i = 0; i < batches.size() / 2; ++i) {
      all.insert(all.end(), batches[i].second.begin(), batches[i].second.end());
    }
    return all;
  }

  // Steady state: everything ran before.
  void CountAllocations() {
    Count("tcp", *rig_.ucx, small_);
    Count("tcp_40000", *rig_.ucx, large_);
    Count("shm", *rig_.shm, small_);
    Count("shm_40000", *rig_.shm, large_);
  }
  void Count(const std::string& what, Channel& channel, PullSet& set) {
    rig_.store.StartMallocCount();
    StartMallocCount();
    (void)RunPulls(channel, set, {});
    const MallocCounts worker = StopMallocCount();
    const MallocCounts store = rig_.store.StopMallocCount();
    const double bursts = set.bursts();
    const std::string name = absl::StrCat(what, "_", size_.name, "_allocations_per_burst");
    rows_.push_back({name, static_cast<double>(worker.ours + store.ours) / bursts, "calls"});
    rows_.push_back({absl::StrCat(what, "_", size_.name, "_vendor_allocations_per_burst"),
                     static_cast<double>(worker.vendor + store.vendor) / bursts, "calls"});
    std::printf("  %-40s ours %.2f + %.2f, UCX's %.1f + %.1f (worker + store)\n", name.c_str(),
                static_cast<double>(worker.ours) / bursts, static_cast<double>(store.ours) / bursts,
                static_cast<double>(worker.vendor) / bursts,
                static_cast<double>(store.vendor) / bursts);
  }

  const SizeCase& size_;
  const BenchOptions& options_;
  std::vector<Row>& rows_;
  Rig rig_;
  PullSet small_, large_;
  std::vector<Way> small_ways_, large_ways_;
  PostingShare tcp_posting_, shm_posting_;
};

// Time of BASE pulls over time of TARGET pulls of the same blocks.
void RunBase(const BenchOptions& options, std::vector<Row>& rows) {
  const SizeCase& size = CaseOf("8k");
  constexpr uint32_t kBursts = 8;
  Rig rig(size, options.settings, 2ull * kBursts * kBurstPieces * size.geometry().SlotBytes());
  PullSet base(size, rig.store, rig.Pool(),
               {.burst_pieces = kBurstPieces, .bursts = kBursts, .choice = PieceChoice::kBase});
  PullSet target(size, rig.store, rig.Pool(),
                 {.burst_pieces = 2 * kBurstPieces, .bursts = kBursts,
                  .choice = PieceChoice::kTarget});
  std::vector<double> shares, rates;
  const auto seconds_of = [&rig](PullSet& set) {
    return LeastDisturbedSeconds(
        [&rig, &set] {
          const absl::Time start = RealClock::Get().Now();
          (void)RunPulls(*rig.ucx, set, {});
          return absl::ToDoubleSeconds(RealClock::Get().Now() - start);
        },
        [&rig] { return rig.store.Waited(); });
  };
  for (int round = -1; round < options.rounds; ++round) {
    const double base_seconds = seconds_of(base);
    const double target_seconds = seconds_of(target);
    if (round < 0) continue;  // warms up
    shares.push_back(base_seconds / target_seconds);
    rates.push_back(static_cast<double>(target.bytes()) / target_seconds / 1e9);
  }
  std::printf("BASE against TARGET, %u blocks' layers of 8 KiB a burst, TARGET at %.2f GB/s\n",
              kBurstPieces, Median(rates));
  std::printf("  %-28s %6.3f   (quartiles %.3f to %.3f)\n", "base_pull_time_share", Median(shares),
              Quantile(shares, 0.25), Quantile(shares, 0.75));
  rows.push_back({"base_pull_time_share", Median(shares), "ratio"});
  rows.push_back({"base_pull_target_gb_per_s", Median(rates), "GB/s"});
}

int BenchMain(const BenchOptions& options) {
  PinThisThread(kWorkerCpu);
  std::vector<Row> rows;
  double tcp_posting = 0;
  double shm_posting = 0;
  for (const char* const name : {"8k", "12k", "64k"}) {
    if (!options.only.empty() && options.only != name) continue;
    CaseRun run(CaseOf(name), options, rows);
    run.Run();
    tcp_posting = std::max(tcp_posting, run.tcp_posting().share());
    shm_posting = std::max(shm_posting, run.shm_posting().share());
  }
  if (tcp_posting > 0) {
    rows.push_back({"posting_share", tcp_posting, "ratio"});
    rows.push_back({"shm_posting_share", shm_posting, "ratio"});
  }
  if (options.only.empty() || options.only == "base") RunBase(options, rows);
  return WriteRows(options.json, rows) ? 0 : 1;
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  int exit_status = 0;
  if (kvt::MaybeStoreMain(argc, argv, &exit_status)) return exit_status;
  kvt::BenchOptions options;
  for (int i = 1; i < argc; i += 2) {
    const absl::string_view key = argv[i];
    const bool value = i + 1 < argc;
    if (value && key == "--json") {
      options.json = argv[i + 1];
    } else if (value && key == "--only") {
      options.only = argv[i + 1];
    } else if (!(value && key == "--rounds" && absl::SimpleAtoi(argv[i + 1], &options.rounds)) &&
               !(value && key == "--poll" &&
                 absl::SimpleAtoi(argv[i + 1], &options.settings.poll_us))) {
      std::fprintf(stderr,
                   "usage: burst_bench [--rounds N] [--json FILE] [--poll US] [--only CASE|base]\n");
      return 2;
    }
  }
  if (sysconf(_SC_NPROCESSORS_ONLN) < 2 || options.rounds < 1) {
    std::fprintf(stderr, "burst_bench: needs two processors and one round\n");
    return 2;
  }
  return kvt::BenchMain(options);
}
