// Bursts of scattered pieces through the production transports, beside what they are to be compared
// with, interleaved in the same run: the raw ceiling of the link, a plain socket, one piece at a
// time; for shared memory a plain memcpy gather. Store and worker are two processes on two cores.
//
//   burst_bench [--rounds N] [--json FILE] [--arena MIB] [--poll US]
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kernels/base/random.h"
#include "kernels/layout/checksum.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_link_probe.h"
#include "kvstore/transport/ucx_transport.h"
#include "tests/bench/burst_controls.h"
#include "tests/support/arena_resolver.h"

namespace kvt {
namespace {

constexpr int kStoreCpu = 0;
constexpr int kWorkerCpu = 1;
constexpr uint32_t kBurstPieces = 512;
constexpr int kLayers = 16;

struct SizeCase {
  std::string name;
  int kv_heads;
  int head_dim;
  int bursts;  // of one measurement
};
const SizeCase kCases[] = {{"8k", 4, 64, 16}, {"12k", 3, 128, 12}, {"64k", 16, 128, 4}};

SessionToken TokenOf(const SizeCase& size) {
  SessionToken token;
  token.session = SessionId(1);
  token.geometry.layers = kLayers;
  token.geometry.kv_heads = size.kv_heads;
  token.geometry.head_dim = size.head_dim;
  return token;
}

}  // namespace
// UcxOptions::poll_before_sleep of every end, the ceiling's too; as in production.
int poll_us = 50;
namespace {

UcxOptions UcxOf(int cpu) {
  UcxOptions options;
  options.poll_before_sleep = absl::Microseconds(poll_us);
  options.tls = "tcp";
  options.net_devices = "lo";
  options.cpu = cpu;
  return options;
}

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  KVT_CHECK(value.ok(), value.status().ToString());
  return std::move(*value);
}

absl::Time In(absl::Duration d) { return RealClock::Get().Now() + d; }

// ---- the store's process ----

int StoreMain(const SizeCase& size, uint64_t arena_bytes) {
  PinThisThread(kStoreCpu);
  ArenaResolverOptions options;
  options.token = TokenOf(size);
  options.geometry = options.token.geometry;
  options.records = static_cast<uint32_t>(arena_bytes / options.geometry.RecordBytes());
  auto resolver = OrDie(ArenaResolver::Create(options));
  for (uint32_t i = 0; i < options.records; ++i) (void)resolver->Seal(i);
  const SharedMapping& arena = resolver->arena();
  UcxServerOptions ucx_options;
  ucx_options.ucx = UcxOf(kStoreCpu);
  auto ucx = OrDie(
      StartUcxServer(ucx_options, absl::MakeSpan(arena.mutable_data(), arena.size()), *resolver));
  ShmServerOptions shm_options;
  shm_options.socket_path = absl::StrCat("/tmp/kvt-burst-bench-", getpid(), ".sock");
  shm_options.cpu = kStoreCpu;
  auto shm = OrDie(StartShmServer(shm_options, arena, resolver->table(), *resolver));
  auto probe = OrDie(StartUcxLinkProbe(ucx_options));
  auto socket = OrDie(SocketServer::Start(arena.data(), arena.size(), kStoreCpu));
  std::printf("%s %s %s %d %d %u\n", ucx->Address().c_str(), shm->Address().c_str(),
              probe->Address().c_str(), socket->port(), arena.fd(), options.records);
  std::fflush(stdout);
  char byte;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  return 0;  // the worker closed our input
}

// The store as the worker's child.
class Store {
 public:
  Store(const SizeCase& size, uint64_t arena_mib) {
    int in[2];
    int out[2];
    KVT_CHECK(pipe(in) == 0 && pipe(out) == 0);
    pid_ = fork();
    KVT_CHECK(pid_ >= 0);
    if (pid_ == 0) {
      (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
      (void)dup2(in[0], STDIN_FILENO);
      (void)dup2(out[1], STDOUT_FILENO);
      close(in[1]);
      close(out[0]);
      const std::string mib = absl::StrCat(arena_mib);
      const std::string poll = absl::StrCat(poll_us);
      execl("/proc/self/exe", "burst_bench", "--store", size.name.c_str(), mib.c_str(),
            poll.c_str(), nullptr);
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    in_ = in[1];
    std::string line;
    char c = 0;
    while (read(out[0], &c, 1) == 1 && c != '\n') line.push_back(c);
    close(out[0]);
    const std::vector<std::string> fields = absl::StrSplit(line, ' ');
    KVT_CHECK(fields.size() == 6, "store said: ", line);
    ucx = fields[0];
    shm = fields[1];
    probe = fields[2];
    KVT_CHECK(absl::SimpleAtoi(fields[3], &socket_port) && absl::SimpleAtoi(fields[4], &arena_fd) &&
              absl::SimpleAtoi(fields[5], &records));
    KVT_CHECK(clock_getcpuclockid(pid_, &clock_) == 0);
  }
  ~Store() {
    close(in_);
    (void)waitpid(pid_, nullptr, 0);
  }
  [[nodiscard]] double CpuSeconds() const {
    timespec ts{};
    KVT_CHECK(clock_gettime(clock_, &ts) == 0);
    return static_cast<double>(ts.tv_sec) + 1e-9 * static_cast<double>(ts.tv_nsec);
  }
  SharedMapping MapArena() const {
    const std::string path = absl::StrCat("/proc/", pid_, "/fd/", arena_fd);
    UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    KVT_CHECK(fd.valid(), path);
    return OrDie(SharedMapping::MapReadOnly(std::move(fd), SharedMappingOptions{}));
  }

  std::string ucx, shm, probe;
  int socket_port = 0;
  int arena_fd = 0;
  uint32_t records = 0;

 private:
  pid_t pid_ = -1;
  int in_ = -1;
  clockid_t clock_ = 0;
};

double WorkerCpuSeconds() {
  timespec ts{};
  KVT_CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts) == 0);
  return static_cast<double>(ts.tv_sec) + 1e-9 * static_cast<double>(ts.tv_nsec);
}

// ---- the bursts ----

// The same pieces and destinations for every way. All memory is made before anything is timed.
class Workload {
 public:
  Workload(const SizeCase& size, const Store& store, uint64_t pool_bytes)
      : geometry_(TokenOf(size).geometry),
        piece_bytes_(geometry_.SlotBytes()),
        pool_(OrDie(PrivateMapping::Create(pool_bytes, SharedMappingOptions{}))) {
    Random random(42);
    const uint64_t slots = pool_.size() / piece_bytes_;
    const uint32_t slices = piece_bytes_ / geometry_.SliceBytes();
    const auto total = static_cast<uint32_t>(size.bursts) * kBurstPieces;
    std::vector<uint32_t> order(slots);
    for (uint32_t i = 0; i < slots; ++i) order[i] = i;
    for (uint64_t i = slots - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
    items_.resize(total);
    destinations_.resize(total);
    offsets_.resize(total);
    statuses_.resize(kBurstPieces);
    checksums_.resize(uint64_t{total} * slices);
    for (uint32_t i = 0; i < total; ++i) {
      const auto record = static_cast<uint32_t>(random.Below(store.records));
      const auto layer = static_cast<int>(random.Below(kLayers));
      destinations_[i] = pool_.data() + uint64_t{order[i % slots]} * piece_bytes_;
      PullItem& item = items_[i];
      item.piece.ticket = 1;
      item.piece.handle = MakeRecordHandle(record, 1);
      item.piece.offset = geometry_.SlotOffset(layer);
      item.piece.length = piece_bytes_;
      item.parts = &destinations_[i];
      item.part_bytes = piece_bytes_;
      item.key_hash = ArenaResolver::KeyHash(record);
      offsets_[i] = uint64_t{record} * geometry_.RecordBytes() + item.piece.offset;
      ArenaResolver::FillPattern(record, 1, destinations_[i], piece_bytes_, item.piece.offset);
      for (uint32_t s = 0; s < slices; ++s) {
        checksums_[uint64_t{i} * slices + s] = SliceChecksum(
            destinations_[i] + uint64_t{s} * geometry_.SliceBytes(), geometry_.SliceBytes(),
            ChecksumSeed(item.key_hash, Plane::kBase,
                         item.piece.offset / geometry_.SliceBytes() + s));
      }
    }
    checked_items_ = items_;
    for (uint32_t i = 0; i < total; ++i) {
      checked_items_[i].checksums = &checksums_[uint64_t{i} * slices];
    }
  }

  [[nodiscard]] int bursts() const { return static_cast<int>(items_.size() / kBurstPieces); }
  [[nodiscard]] uint64_t bytes() const { return items_.size() * uint64_t{piece_bytes_}; }
  [[nodiscard]] uint32_t piece_bytes() const { return piece_bytes_; }
  [[nodiscard]] absl::Span<const PullItem> Items(int burst, bool checked) const {
    const auto& items = checked ? checked_items_ : items_;
    return absl::MakeConstSpan(items).subspan(static_cast<size_t>(burst) * kBurstPieces,
                                              kBurstPieces);
  }
  [[nodiscard]] absl::Span<const uint64_t> Offsets(int burst) const {
    return absl::MakeConstSpan(offsets_).subspan(static_cast<size_t>(burst) * kBurstPieces,
                                                 kBurstPieces);
  }
  [[nodiscard]] absl::Span<std::byte* const> Destinations(int burst) const {
    return absl::MakeConstSpan(destinations_)
        .subspan(static_cast<size_t>(burst) * kBurstPieces, kBurstPieces);
  }
  [[nodiscard]] absl::Span<PieceStatus> statuses() { return absl::MakeSpan(statuses_); }

  void Wipe() { std::memset(pool_.data(), 0, pool_.size()); }
  // Dies unless every destination holds its piece.
  void Verify() const {
    std::vector<std::byte> pattern(piece_bytes_);
    for (size_t i = 0; i < items_.size(); ++i) {
      ArenaResolver::FillPattern(RecordIndexOf(items_[i].piece.handle), 1, pattern.data(),
                                 piece_bytes_, items_[i].piece.offset);
      KVT_CHECK(std::memcmp(pattern.data(), destinations_[i], piece_bytes_) == 0, "piece ", i);
    }
  }

 private:
  const Geometry geometry_;
  const uint32_t piece_bytes_;
  PrivateMapping pool_;
  std::vector<PullItem> items_, checked_items_;
  std::vector<std::byte*> destinations_;
  std::vector<uint64_t> offsets_;
  std::vector<uint64_t> checksums_;
  std::vector<PieceStatus> statuses_;
};

// Bursts over a channel, each submitted by the callback of an earlier one.
class ChannelRun {
 public:
  // `pieces` per burst, `outstanding` bursts at once, `total` pieces in all.
  static void Go(Channel& channel, Workload& work, bool checked, uint32_t pieces,
                 uint32_t outstanding, uint32_t total) {
    ChannelRun run(channel, work, checked, pieces, total);
    for (uint32_t i = 0; i < outstanding; ++i) run.Next();
    MutexLock lock(run.mu_);
    while (run.finished_ < total) KVT_CHECK(run.changed_.WaitFor(run.mu_, absl::Seconds(60)));
  }

 private:
  ChannelRun(Channel& channel, Workload& work, bool checked, uint32_t pieces, uint32_t total)
      : channel_(channel), work_(work), checked_(checked), pieces_(pieces), total_(total) {}
  void Next() {
    const uint32_t at = started_.fetch_add(pieces_);
    if (at >= total_) return;
    PullRequest request;
    request.items = work_.Items(static_cast<int>(at / kBurstPieces), checked_)
                        .subspan(at % kBurstPieces, pieces_);
    request.statuses = work_.statuses().subspan(at % kBurstPieces, pieces_);
    request.deadline = In(absl::Seconds(60));
    request.done = [this](const BurstResult& result) {
      KVT_CHECK(result.status.ok() && result.pieces_ok == pieces_, result.status.ToString(),
                " missed ", result.pieces_missed);
      Next();
      MutexLock lock(mu_);
      finished_ += pieces_;
      if (finished_ >= total_) changed_.NotifyAll();
    };
    KVT_CHECK(channel_.Pull(std::move(request)).ok());
  }
  Channel& channel_;
  Workload& work_;
  const bool checked_;
  const uint32_t pieces_;
  const uint32_t total_;
  std::atomic<uint32_t> started_{0};
  Mutex mu_;
  CondVar changed_;
  uint32_t finished_ ABSL_GUARDED_BY(mu_) = 0;
};

// ---- measuring ----

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Way {
  std::string name;
  uint64_t bytes;  // of one measurement
  std::function<void()> run;
  std::vector<double> gbps;
  double worker_cpu = 0;
  double store_cpu = 0;
  double gib = 0;
};

struct Row {
  std::string name;
  double value;
  std::string unit;
};

void Measure(Way& way, const Store& store) {
  const double worker = WorkerCpuSeconds();
  const double stores = store.CpuSeconds();
  const absl::Time start = RealClock::Get().Now();
  way.run();
  const double seconds = absl::ToDoubleSeconds(RealClock::Get().Now() - start);
  way.worker_cpu += WorkerCpuSeconds() - worker;
  way.store_cpu += store.CpuSeconds() - stores;
  way.gib += static_cast<double>(way.bytes) / static_cast<double>(kGiB);
  way.gbps.push_back(static_cast<double>(way.bytes) / seconds / 1e9);
}

Way* Find(std::vector<Way>& ways, const std::string& name) {
  for (Way& way : ways) {
    if (way.name == name) return &way;
  }
  return nullptr;
}

// Ratios of the same round, so that noise that lasts longer than a round cancels.
void AddRatio(std::vector<Way>& ways, const std::string& ours, const std::string& theirs,
              const std::string& row, std::vector<Row>& rows) {
  const Way& a = *Find(ways, ours);
  const Way& b = *Find(ways, theirs);
  std::vector<double> ratios;
  for (size_t i = 0; i < a.gbps.size(); ++i) ratios.push_back(a.gbps[i] / b.gbps[i]);
  std::sort(ratios.begin(), ratios.end());
  const double median = Median(ratios);
  std::printf("  %-28s %6.2f   (quartiles %.2f to %.2f)\n", row.c_str(), median,
              ratios[ratios.size() / 4], ratios[ratios.size() * 3 / 4]);
  rows.push_back({row, median, "ratio"});
}

LinkProbeOptions CeilingOptions(LinkProbeProtocol protocol) {
  LinkProbeOptions options;
  options.messages = 48;
  options.protocol = protocol;
  return options;
}

void RunCase(const SizeCase& size, int rounds, uint64_t arena_mib, std::vector<Row>& rows) {
  Store store(size, arena_mib);
  Workload work(size, store, arena_mib * kMiB / 2);
  const SessionToken token = TokenOf(size);
  auto ucx_transport = OrDie(MakeUcxTransport(UcxOf(kWorkerCpu)));
  auto ucx = OrDie(ucx_transport->Connect(store.ucx, token, In(absl::Seconds(20))));
  ShmOptions shm_options;
  shm_options.cpu = kWorkerCpu;
  auto shm_transport = MakeShmTransport(shm_options);
  auto shm = OrDie(shm_transport->Connect(store.shm, token, In(absl::Seconds(20))));
  auto probe = OrDie(ConnectUcxLinkProbe(UcxOf(kWorkerCpu), store.probe));
  auto socket = OrDie(SocketClient::Connect(store.socket_port));
  const SharedMapping arena = store.MapArena();
  const auto total = static_cast<uint32_t>(work.bursts()) * kBurstPieces;
  const uint64_t one_by_one = kBurstPieces * uint64_t{work.piece_bytes()};

  std::vector<Way> ways;
  const auto add = [&](std::string name, uint64_t bytes, std::function<void()> run) {
    Way way;
    way.name = std::move(name);
    way.bytes = bytes;
    way.run = std::move(run);
    ways.push_back(std::move(way));
  };
  const auto ceiling = [&](LinkProbeProtocol protocol) {
    return [&probe, protocol] {
      (void)OrDie(probe->Measure(CeilingOptions(protocol), In(absl::Seconds(60))));
    };
  };
  const uint64_t ceiling_bytes = 48ull * 4 * kMiB;
  add("ceiling rendezvous", ceiling_bytes, ceiling(LinkProbeProtocol::kRendezvous));
  add("ceiling eager", ceiling_bytes, ceiling(LinkProbeProtocol::kEager));
  add("tcp", work.bytes(), [&] { ChannelRun::Go(*ucx, work, false, kBurstPieces, 1, total); });
  add("socket", work.bytes(), [&] {
    for (int b = 0; b < work.bursts(); ++b) {
      const absl::Status status =
          socket->Pull(work.Offsets(b), work.piece_bytes(), work.Destinations(b));
      KVT_CHECK(status.ok(), status.ToString());
    }
  });
  add("tcp checksums", work.bytes(),
      [&] { ChannelRun::Go(*ucx, work, true, kBurstPieces, 1, total); });
  add("one by one", one_by_one, [&] { ChannelRun::Go(*ucx, work, false, 1, 1, kBurstPieces); });
  add("one by one, 32", one_by_one * 2,
      [&] { ChannelRun::Go(*ucx, work, false, 1, 32, 2 * kBurstPieces); });
  add("memcpy", work.bytes(), [&] {
    for (int b = 0; b < work.bursts(); ++b) {
      for (uint32_t i = 0; i < kBurstPieces; ++i) {
        std::memcpy(work.Destinations(b)[i], arena.data() + work.Offsets(b)[i], work.piece_bytes());
      }
    }
  });
  add("shm", work.bytes(), [&] { ChannelRun::Go(*shm, work, false, kBurstPieces, 1, total); });
  add("shm checksums", work.bytes(),
      [&] { ChannelRun::Go(*shm, work, true, kBurstPieces, 1, total); });

  // Each way once unmeasured, its bytes verified.
  for (Way& way : ways) {
    const bool whole = way.bytes == work.bytes();
    if (whole) work.Wipe();
    way.run();
    if (whole) work.Verify();
  }
  std::vector<double> core;
  for (int round = 0; round < rounds; ++round) {
    core.push_back(CoreToCoreNs(kStoreCpu, kWorkerCpu));
    for (Way& way : ways) Measure(way, store);
  }
  std::printf("%s pieces, %u per burst, %d bursts a measurement, %d rounds, core to core %.0f ns\n",
              size.name.c_str(), kBurstPieces, work.bursts(), rounds, Median(core));
  std::printf("  %-28s %8s %17s  %s\n", "", "GB/s", "quartiles", "CPU s/GiB worker + store");
  for (Way& way : ways) {
    std::vector<double> sorted = way.gbps;
    std::sort(sorted.begin(), sorted.end());
    std::printf("  %-28s %8.2f   %6.2f to %5.2f  %10.2f + %.2f\n", way.name.c_str(), Median(sorted),
                sorted[sorted.size() / 4], sorted[sorted.size() * 3 / 4], way.worker_cpu / way.gib,
                way.store_cpu / way.gib);
  }
  const bool eager =
      Median(Find(ways, "ceiling eager")->gbps) > Median(Find(ways, "ceiling rendezvous")->gbps);
  const std::string best = eager ? "ceiling eager" : "ceiling rendezvous";
  const std::string& n = size.name;
  AddRatio(ways, "tcp", "socket", "tcp_" + n + "_vs_socket", rows);
  AddRatio(ways, "tcp", best, "tcp_" + n + "_vs_ceiling", rows);
  AddRatio(ways, "tcp", "one by one", "tcp_" + n + "_vs_one_by_one", rows);
  AddRatio(ways, "tcp", "one by one, 32", "tcp_" + n + "_vs_one_by_one_32", rows);
  AddRatio(ways, "tcp checksums", "tcp", "tcp_" + n + "_checksum_vs_off", rows);
  AddRatio(ways, "shm", "memcpy", "shm_" + n + "_vs_memcpy", rows);
  AddRatio(ways, "shm checksums", "shm", "shm_" + n + "_checksum_vs_off", rows);
  if (n == "8k") rows.push_back({"core_to_core_ns", Median(core), "ns"});
  std::fflush(stdout);
  ucx.reset();
  shm.reset();
}

int BenchMain(int rounds, uint64_t arena_mib, const std::string& json) {
  PinThisThread(kWorkerCpu);
  std::vector<Row> rows;
  for (const SizeCase& size : kCases) RunCase(size, rounds, arena_mib, rows);
  if (json.empty()) return 0;
  std::ofstream out(json);
  out << "{\"rows\":[";
  for (size_t i = 0; i < rows.size(); ++i) {
    out << (i > 0 ? "," : "")
        << absl::StrFormat("{\"name\":\"%s\",\"value\":%.4f,\"unit\":\"%s\"}", rows[i].name,
                           rows[i].value, rows[i].unit);
  }
  out << "]}\n";
  return out.good() ? 0 : 1;
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  uint64_t arena_mib = 1024;
  if (argc == 5 && std::strcmp(argv[1], "--store") == 0 && absl::SimpleAtoi(argv[3], &arena_mib) &&
      absl::SimpleAtoi(argv[4], &kvt::poll_us)) {
    for (const kvt::SizeCase& size : kvt::kCases) {
      if (size.name == argv[2]) return kvt::StoreMain(size, arena_mib * kvt::kMiB);
    }
    return 2;
  }
  int rounds = 11;
  std::string json;
  for (int i = 1; i + 1 < argc; i += 2) {
    const absl::string_view key = argv[i];
    if (key == "--json") {
      json = argv[i + 1];
    } else if (!(key == "--rounds" && absl::SimpleAtoi(argv[i + 1], &rounds)) &&
               !(key == "--poll" && absl::SimpleAtoi(argv[i + 1], &kvt::poll_us)) &&
               !(key == "--arena" && absl::SimpleAtoi(argv[i + 1], &arena_mib))) {
      std::fprintf(stderr,
                   "usage: burst_bench [--rounds N] [--json FILE] [--arena MIB] [--poll US]\n");
      return 2;
    }
  }
  if (sysconf(_SC_NPROCESSORS_ONLN) < 2 || rounds < 1) {
    std::fprintf(stderr, "burst_bench: needs two processors and one round\n");
    return 2;
  }
  return kvt::BenchMain(rounds, arena_mib, json);
}
