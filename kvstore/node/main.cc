// kvtide-store: a store node of the tier. Keeps blocks of KV in host memory, serves control calls
// by gRPC and bytes by UCX and shared memory. With --probe it says what of this host would keep it from
// that, and ends. Exit codes: 0 stopped by SIGTERM or SIGINT, nothing failed; 1 could not start, a check
// failed; 2 bad command line.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/log.h"
#include "kernels/base/metrics.h"
#include "kvstore/client/host_id.h"
#include "kvstore/client/membership_agent.h"
#include "kvstore/client/node_options.h"
#include "kvstore/media/rocksdb_spill_store.h"
#include "kvstore/node/arena_populate.h"
#include "kvstore/node/host_probe.h"
#include "kvstore/node/store_metrics.h"
#include "kvstore/node/store_node.h"
#include "kvstore/node/store_options.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_transport.h"
#include "kvstore/wire/wire_rpc.h"

namespace kvt {
namespace {

constexpr int kTicksPerObservation = 4;  // of the metrics: every second
constexpr absl::Duration kCoordinatorTimeout = absl::Seconds(1);
// From SIGTERM: leaving the cluster takes at most kCoordinatorTimeout, running transfers get this
// long, calls the grace, and closing the metrics endpoint up to 2 s; together less than 5 s.
constexpr absl::Duration kDrainTimeout = absl::Seconds(1);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(10);
constexpr absl::Duration kStopGrace = absl::Milliseconds(500);
// The spill threads look at the stop flag at least so often.
constexpr absl::Duration kSpillWait = absl::Milliseconds(250);
// Entries of the tables beside both media.
constexpr uint64_t kStoreBlocksMax = uint64_t{1} << 26;

struct Options {
  NodeOptions node;
  StoreOptions store;
};

absl::StatusOr<Options> ReadOptions(const std::string& path) {
  KVT_ASSIGN_OR_RETURN(OptionsFile file, OptionsFile::Load(path));
  Options options;
  options.node = ReadNodeOptions(file.Table("node"));
  options.store = ReadStoreOptions(file.Table("store"));
  KVT_RETURN_IF_ERROR(file.Finish());
  return options;
}

HostProbeOptions ProbeOptionsOf(const Options& options) {
  HostProbeOptions probe;
  probe.arena_bytes = options.store.arena_bytes;
  probe.ucx = options.store.ucx;
  probe.net_devices = options.store.ucx_net_devices;
  probe.tls = options.store.ucx_tls;
  probe.spill_folder = options.store.spill_folder;
  probe.spill_bytes = options.store.spill_folder.empty() ? 0 : options.store.spill_bytes;
  probe.listens = {{"listen", options.node.listen},
                   {"metrics_listen", options.node.metrics_listen},
                   {"ucx_listen", options.store.ucx ? options.store.ucx_listen : ""}};
  return probe;
}

// Prints what the host offers to a store of that configuration (none: the defaults).
int ProbeMain(const std::string& config, bool json) {
  std::vector<ProbeLine> lines;
  const absl::StatusOr<Options> options = config.empty() ? Options{} : ReadOptions(config);
  if (options.ok()) {
    HostProbeOptions probe = ProbeOptionsOf(*options);
    probe.measure_disk = true;
    lines = ProbeHost(probe);
  } else {
    lines.push_back({"configuration", ProbeState::kFail, std::string(options.status().message()),
                     "correct the file (docs/CONFIG.md)"});
  }
  std::fputs((json ? ProbeJson(lines) : ProbeText(lines)).c_str(), stdout);
  return ProbeStatus(lines).ok() ? 0 : 1;
}

// The host that others use for an address that this process listens on.
std::string Advertised(const Options& options, const std::string& host) {
  return options.store.advertise_host.empty() ? host : options.store.advertise_host;
}

absl::StatusOr<std::string> ShmSocketPath(const Options& options) {
  if (!options.store.shm_socket.empty()) return options.store.shm_socket;
  const std::string folder = absl::StrCat("/tmp/kvtide-", getuid());
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::UnavailableError(absl::StrCat(folder, ": ", std::strerror(errno)));
  }
  return absl::StrCat(folder, "/", options.node.name, ".", getpid(), ".sock");
}

absl::StatusOr<std::string> ReadTicketKey(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) {
    return absl::NotFoundError(
        absl::StrCat("ticket_public_key_file ", path, ": ", std::strerror(errno)));
  }
  const std::string hex(absl::StripAsciiWhitespace(text.str()));
  if (hex.size() != 64 || hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("ticket_public_key_file ", path, ": not 64 hexadecimal digits"));
  }
  return absl::HexStringToBytes(hex);
}

// Appears whole or not at all.
absl::Status WriteAddressFile(const std::string& path, const std::string& address) {
  const std::string temporary = path + ".new";
  std::ofstream out(temporary, std::ios::trunc);
  out << address << "\n";
  out.close();
  if (!out || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat("address_file ", path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

// The servers of the data plane; destroyed before the node.
struct DataPlane {
  std::unique_ptr<TransportServer> ucx;
  std::unique_ptr<TransportServer> shm;
  DataPlaneAddresses addresses;

  void Stop() {
    if (shm != nullptr) shm->Stop();
    if (ucx != nullptr) ucx->Stop();
  }
};

absl::StatusOr<DataPlane> StartDataPlane(const Options& options, Arena& arena, StoreNode& node) {
  DataPlane plane;
  if (options.store.ucx) {
    UcxServerOptions ucx;
    ucx.ucx.net_devices = options.store.ucx_net_devices;
    ucx.ucx.tls = options.store.ucx_tls;
    KVT_ASSIGN_OR_RETURN(const HostPort at, ParseHostPort(options.store.ucx_listen));
    ucx.host = at.host;
    ucx.port = at.port;
    KVT_ASSIGN_OR_RETURN(plane.ucx, StartUcxServer(ucx, arena.bytes(), node));
    const std::string address = plane.ucx->Address();
    const size_t colon = address.rfind(':');
    plane.addresses.ucx_address =
        absl::StrCat("ucx:", Advertised(options, at.host), address.substr(colon));
  }
  if (options.store.shm) {
    ShmServerOptions shm;
    KVT_ASSIGN_OR_RETURN(shm.socket_path, ShmSocketPath(options));
    KVT_ASSIGN_OR_RETURN(plane.shm, StartShmServer(shm, arena.mapping(), arena.table(), node));
    plane.addresses.shm_socket = shm.socket_path;
  }
  return plane;
}

class Membership {
 public:
  // Joins the cluster on a thread of its own. `node` outlives it.
  Membership(const Options& options, const StoreNodeConfig& config, uint64_t capacity_bytes,
             const std::string& control_address, StoreNode& node)
      : coordinator_(ConnectCoordinator(options.node.coordinator, kCoordinatorTimeout)),
        agent_(*coordinator_, MakeOptions(config, capacity_bytes, control_address),
               MakeEvents(node), RealClock::Get()),
        thread_([this] { agent_.Run(); }) {}
  ~Membership() { Leave(); }

  // The node's readiness has changed.
  void SendNow() { agent_.SendNow(); }

  void Leave() {
    agent_.Stop();
    if (thread_.joinable()) thread_.join();
  }

 private:
  static MembershipOptions MakeOptions(const StoreNodeConfig& config, uint64_t capacity_bytes,
                                       const std::string& control_address) {
    MembershipOptions options;
    options.node.kind = NodeKind::kStore;
    options.node.name = config.name;
    options.node.epoch = config.epoch;
    options.node.control_address = control_address;
    options.node.pid = getpid();
    options.node.capacity_bytes = capacity_bytes;
    options.node.starting = true;
    return options;
  }
  static MembershipEvents MakeEvents(StoreNode& node) {
    MembershipEvents events;
    events.load = [&node] {
      LoadReport load;
      load.running = static_cast<uint32_t>(node.StatsNow().tickets);
      if (const int percent = node.starting_percent(); percent >= 0) {
        load.starting = true;
        load.starting_percent = static_cast<uint32_t>(percent);
      }
      load.condition = node.Condition();
      return load;
    };
    events.on_registered = [&node](const RegisterReply& reply) {
      const absl::Status added = node.AddTicketKey(reply.ticket_public_key);
      if (!added.ok()) KVT_LOG(kError, "the coordinator's ticket key: ", added.message());
    };
    events.on_drain = [&node](bool draining) {
      KVT_LOG(kInfo, draining ? "draining: no new work" : "not draining any more");
      node.SetDraining(draining);
    };
    return events;
  }

  std::unique_ptr<CoordinatorApi> coordinator_;
  MembershipAgent agent_;
  std::thread thread_;
};

// The second medium and the threads that move records to and from it.
class Spill {
 public:
  // Opens the folder and takes back what is in it. Before the node is ready.
  static absl::StatusOr<std::unique_ptr<Spill>> Start(const StoreOptions& options,
                                                      StoreNode& node) {
    RocksDbSpillOptions spill;
    spill.folder = options.spill_folder;
    spill.quota_bytes = options.spill_bytes;
    spill.direct_io = options.spill_direct_io;
    KVT_ASSIGN_OR_RETURN(std::unique_ptr<SpillStore> disk, OpenRocksDbSpillStore(spill));
    KVT_RETURN_IF_ERROR(node.AttachDisk(*disk));
    return std::unique_ptr<Spill>(new Spill(std::move(disk), options.spill_readers, node));
  }
  ~Spill() {
    stopping_.store(true);
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  Spill(std::unique_ptr<SpillStore> disk, int readers, StoreNode& node) : disk_(std::move(disk)) {
    threads_.emplace_back([this, &node] {
      while (!stopping_.load()) {
        if (!node.SpillRound()) node.WaitForSpill(kSpillWait);
      }
    });
    for (int i = 0; i < readers; ++i) {
      threads_.emplace_back([this, &node] {
        while (!stopping_.load()) {
          if (!node.PromoteRound()) node.WaitForPromote(kSpillWait);
        }
      });
    }
  }

  const std::unique_ptr<SpillStore> disk_;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

// SIGTERM or SIGINT, which are blocked, waits to be taken.
bool StopIsPending() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGTERM) == 1 || sigismember(&pending, SIGINT) == 1;
}

// Serves until a signal.
void Serve(StoreNode& node, StoreMetrics& metrics, const sigset_t& stop_signals) {
  for (int ticks = 0;; ++ticks) {
    const absl::Time now = RealClock::Get().Now();
    const timespec tick = absl::ToTimespec(NextOnGrid(now, kStoreTick) - now);
    const int signal = sigtimedwait(&stop_signals, nullptr, &tick);
    if (signal > 0) {
      KVT_LOG(kInfo, "stopping: ", strsignal(signal));
      return;
    }
    node.Tick();
    if (ticks % kTicksPerObservation == 0) metrics.Observe(node.StatsNow());
  }
}

// Waits until no transfer runs, or kDrainTimeout, or a second signal.
void Drain(StoreNode& node, const sigset_t& stop_signals) {
  const timespec tick = absl::ToTimespec(kDrainPoll);
  const absl::Time deadline = RealClock::Get().Now() + kDrainTimeout;
  while (!node.IsQuiet() && RealClock::Get().Now() < deadline) {
    if (sigtimedwait(&stop_signals, nullptr, &tick) > 0) return;
    node.Tick();
  }
}

// Makes the memory and the data plane ready; the control port answers meanwhile. Cancelled on a stop
// signal.
absl::StatusOr<DataPlane> MakeReady(const Options& options, Arena& arena, StoreNode& node,
                                    std::unique_ptr<Spill>* spill) {
  KVT_RETURN_IF_ERROR(PopulateArena(
      arena, options.store.populate_threads, [] { return StopIsPending(); },
      [&](uint64_t done) {
        node.SetStarting(static_cast<int>(done * 100 / arena.size()));
        node.Tick();
      }));
  if (!options.store.spill_folder.empty()) {
    KVT_ASSIGN_OR_RETURN(*spill, Spill::Start(options.store, node));
  }
  KVT_ASSIGN_OR_RETURN(DataPlane plane, StartDataPlane(options, arena, node));
  node.SetDataPlane(plane.addresses);
  node.SetReady();
  return plane;
}

// Of a store with that arena; the number of blocks covers both media.
StoreNodeConfig MakeConfig(const Options& options) {
  StoreNodeConfig config;
  config.name = options.node.name;
  config.epoch = BootEpoch(static_cast<uint64_t>(absl::ToUnixMillis(absl::Now())));
  config.host_id = LocalHostId();
  config.lease = options.store.lease;
  config.slab_bytes = RecordAllocator::SlabBytesFor(options.store.arena_bytes);
  config.tenant_bytes_max = options.store.tenant_bytes;
  config.tenant_disk_bytes_max = options.store.tenant_disk_bytes;
  uint64_t bytes = RoundUp(options.store.arena_bytes, config.slab_bytes);
  if (!options.store.spill_folder.empty()) {
    config.has_disk = true;
    // What the folder keeps for rewriting, and its own files, are not ours.
    config.disk_bytes_max = options.store.spill_bytes / 16 * 13;
    config.spill_one_time = options.store.spill_one_time;
    config.spill_high_watermark = options.store.spill_watermark_high / 100.0;
    config.spill_low_watermark = options.store.spill_watermark_low / 100.0;
    config.promoted_hold = options.store.spill_hold;
    config.spill_wait = options.store.spill_wait;
    bytes += options.store.spill_bytes;
  }
  config.blocks_max = static_cast<uint32_t>(
      std::min<uint64_t>(bytes / StoreOptions::kBlockBytesMin, kStoreBlocksMax));
  return config;
}

absl::Status Run(const Options& options, const sigset_t& stop_signals) {
  KVT_ASSIGN_OR_RETURN(const HostPort listen, ParseHostPort(options.node.listen));
  // Before anything is made.
  const std::vector<ProbeLine> host = ProbeHost(ProbeOptionsOf(options));
  KVT_RETURN_IF_ERROR(ProbeStatus(host));
  for (const ProbeLine& line : host) {
    if (line.state == ProbeState::kWarn) {
      KVT_LOG(kInfo, line.check, ": ", line.found, "; ", line.remedy);
    }
  }
  const StoreNodeConfig config = MakeConfig(options);
  const uint64_t arena_bytes = RoundUp(options.store.arena_bytes, config.slab_bytes);
  KVT_ASSIGN_OR_RETURN(Arena arena, Arena::Create(arena_bytes, config.blocks_max * kPlanes));

  StoreNode node(config, arena, RealClock::Get());
  node.SetStarting(0);
  if (!options.store.ticket_public_key_file.empty()) {
    KVT_ASSIGN_OR_RETURN(const std::string key,
                         ReadTicketKey(options.store.ticket_public_key_file));
    KVT_RETURN_IF_ERROR(node.AddTicketKey(key));
  }
  MetricsRegistry registry;
  StoreMetrics metrics(registry);
  if (!options.node.metrics_listen.empty()) {
    KVT_ASSIGN_OR_RETURN(const HostPort at, ParseHostPort(options.node.metrics_listen));
    KVT_ASSIGN_OR_RETURN(const int port, registry.Serve(at.host, at.port));
    KVT_LOG(kInfo, "metrics on ", at.host, ":", port);
  }
  metrics.SetReady(false);
  KVT_ASSIGN_OR_RETURN(const std::unique_ptr<RpcServer> server,
                       ServeStore(node, options.node.listen));
  server->SetReady(false);
  const std::string address = absl::StrCat(Advertised(options, listen.host), ":", server->port());
  std::unique_ptr<Membership> membership;
  if (options.store.ticket_public_key_file.empty()) {
    membership = std::make_unique<Membership>(options, config, arena_bytes, address, node);
  }
  KVT_LOG(kInfo, config.name, " control on ", address, ", not ready yet");
  std::unique_ptr<Spill> spill;
  absl::StatusOr<DataPlane> ready = MakeReady(options, arena, node, &spill);
  if (absl::IsCancelled(ready.status())) return absl::OkStatus();
  KVT_RETURN_IF_ERROR(ready.status());
  DataPlane& plane = *ready;
  server->SetReady(true);
  metrics.SetReady(true);
  if (membership != nullptr) membership->SendNow();
  if (!options.store.address_file.empty()) {
    KVT_RETURN_IF_ERROR(WriteAddressFile(options.store.address_file, address));
  }
  KVT_LOG(kInfo, config.name, " listening on ", address, ", data on ",
          plane.addresses.ucx_address.empty() ? "no ucx" : plane.addresses.ucx_address, " and ",
          plane.addresses.shm_socket.empty() ? "no shm" : plane.addresses.shm_socket);

  Serve(node, metrics, stop_signals);

  node.SetDraining(true);
  if (membership != nullptr) membership->Leave();
  Drain(node, stop_signals);
  plane.Stop();
  server->Shutdown(kStopGrace);
  if (!options.store.address_file.empty()) unlink(options.store.address_file.c_str());
  KVT_LOG(kInfo, config.name, " stopped");
  return absl::OkStatus();
}

absl::Status Main(const std::string& config, const sigset_t& stop_signals) {
  KVT_ASSIGN_OR_RETURN(const Options options, ReadOptions(config));
  KVT_RETURN_IF_ERROR(InitLog("kvtide-store", options.node.log_level, options.node.log_file));
  return Run(options, stop_signals);
}

}  // namespace
}  // namespace kvt

int main(int argc, char** argv) {
  CLI::App app{"kvtide-store: a store node of a kvtide cluster"};
  std::string config;
  bool probe = false;
  std::string output = "table";
  CLI::Option* const config_option =
      app.add_option("--config", config, "TOML file ([node], [store]; see docs/CONFIG.md)");
  app.add_flag("--probe", probe, "say what this host offers to such a store, and end");
  app.add_option("--output,-o", output, "with --probe: table (for people) or json")
      ->check(CLI::IsMember({"table", "json"}));
  app.footer(
      "Exit codes: 0 stopped by SIGTERM or SIGINT, or nothing failed (--probe); 1 could not start, or a "
      "check failed; 2 bad command line.");
  try {
    app.parse(argc, argv);
    if (!probe && config_option->count() == 0) throw CLI::RequiredError("--config");
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  // A file beyond its limit is an error to report, not the end.
  signal(SIGXFSZ, SIG_IGN);
  if (probe) return kvt::ProbeMain(config, output == "json");
  // Before any thread, so that every thread inherits the mask and only the main loop takes them.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  sigprocmask(SIG_BLOCK, &stop_signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  const absl::Status status = kvt::Main(config, stop_signals);
  if (status.ok()) return 0;
  std::fprintf(stderr, "kvtide-store: %s\n", std::string(status.message()).c_str());
  return 1;
}
