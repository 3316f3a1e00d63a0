#include "tests/bench/bench_store.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/random.h"
#include "kernels/layout/checksum.h"
#include "kvstore/index/record_allocator.h"
#include "kvstore/media/rocksdb_spill_store.h"
#include "kvstore/node/store_node.h"
#include "kvstore/transport/ucx_link_probe.h"
#include "tests/bench/burst_controls.h"
#include "tests/bench/peer_process.h"

namespace kvt {
namespace {

constexpr uint64_t kNeighbourTicket = 2;
constexpr uint64_t kPassingTicket = 3;
constexpr int kMineInTurn = 12;
constexpr int kNeighboursInTurn = 2;
constexpr uint64_t kSpilledLeast = 8;  // records
constexpr uint64_t kDiskBytes = 2 * kGiB;
constexpr char kFingerprint[] = "bench";
constexpr char kNumerics[] = "bench";

const SizeCase kCases[] = {{"8k", 16, 4, 64, false, 16, 1024},
                           {"12k", 16, 3, 128, false, 12, 1024},
                           {"64k", 16, 16, 128, false, 4, 4096},
                           {"16m", 64, 32, 256, true, 1, 1024}};

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  KVT_CHECK(value.ok(), value.status().ToString());
  return std::move(*value);
}

// Puts blocks into the node as a worker would, but for the transport.
class Filler {
 public:
  Filler(const SizeCase& size, StoreNode& node, Arena& arena)
      : geometry_(size.geometry()), node_(node), arena_(arena), signer_(TicketSigner::Generate()) {
    KVT_CHECK(node_.AddTicketKey(signer_->PublicKey()).ok());
    OpenSessionRequest open;
    open.worker = "bench";
    open.worker_epoch = BootEpoch(1);
    open.geometry = geometry_;
    open.model_fingerprint = kFingerprint;
    open.numerics_id = kNumerics;
    session_ = OrDie(node_.OpenSession(open));
    KeyDomain domain;
    domain.cluster_secret = "0123456789abcdef";
    domain.model_fingerprint = kFingerprint;
    domain.numerics_id = kNumerics;
    domain.geometry = geometry_;
    chain_ = std::make_unique<KeyChain>(domain);
    parent_ = chain_->Root();
    buffer_.resize(geometry_.RecordBytes());
  }

  void Fill() {
    const uint64_t capacity = node_.StatsNow().capacity_bytes / 16 * 13;
    const uint64_t turn = 2ull * geometry_.RecordBytes() * (kMineInTurn + 2 * kNeighboursInTurn);
    const uint64_t turns = std::max<uint64_t>(capacity / turn, 1);
    for (uint64_t i = 0; i < turns; ++i) {
      Put(kBenchTicket, kMineInTurn);
      Put(kNeighbourTicket, kNeighboursInTurn);
      PutPassing();
    }
  }
  // Goes on with blocks that nobody pins until records lie on disk only.
  uint64_t FillDisk() {
    const absl::Time deadline = RealClock::Get().Now() + absl::Minutes(1);
    while (OnDisk(node_.StatsNow()) < kSpilledLeast) {
      KVT_CHECK(RealClock::Get().Now() < deadline, "nothing goes to disk: ",
                node_.StatsNow().disk_failing);
      PutPassing();
    }
    return OnDisk(node_.StatsNow());
  }
  [[nodiscard]] const OpenSessionReply& session() const { return session_; }
  [[nodiscard]] const std::vector<StoredRecord>& mine() const { return mine_; }

 private:
  static uint64_t OnDisk(const StoreStats& stats) {
    return stats.disk_records[0] + stats.disk_records[1];
  }
  void PutPassing() {
    Put(kPassingTicket, kNeighboursInTurn);
    KVT_CHECK(node_.Release({session_.session, {TicketId(kPassingTicket), TicketEpoch(1)}}).ok());
  }
  void Put(uint64_t ticket, int count) {
    Ticket grant;
    grant.id = TicketId(ticket);
    grant.epoch = TicketEpoch(1);
    grant.model_fingerprint = kFingerprint;
    grant.numerics_id = kNumerics;
    ReserveRequest request;
    request.session = session_.session;
    request.ticket = signer_->Sign(grant);
    for (int i = 0; i < count; ++i) {
      BlockName name;
      name.parent = parent_;
      for (int t = 0; t < kBlockTokens; ++t) name.tokens.push_back(next_token_++);
      name.key = parent_ = chain_->Next(parent_, name.tokens, Provenance::kExact);
      request.blocks.push_back(name);
    }
    absl::StatusOr<ReserveReply> answer = node_.Reserve(request);
    while (absl::IsResourceExhausted(answer.status())) {  // what goes to disk makes room
      node_.Tick();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      answer = node_.Reserve(request);
    }
    const ReserveReply reserved = OrDie(std::move(answer));
    for (int i = 0; i < count; ++i) {
      for (const Plane plane : {Plane::kBase, Plane::kResidual}) {
        Push(ticket, reserved.blocks[i].place.handle, request.blocks[i].key, plane);
      }
    }
  }
  void Push(uint64_t ticket, uint64_t block, const BlockKey& key, Plane plane) {
    PushedPiece pushed;
    pushed.piece.ticket = ticket;
    pushed.piece.ticket_epoch = 1;
    pushed.piece.handle = PlaneRecordHandle(block, plane);
    pushed.piece.length = geometry_.RecordBytes();
    ResolvedPush to;
    node_.ResolvePush(session_.session, absl::MakeConstSpan(&pushed.piece, 1),
                      absl::MakeSpan(&to, 1));
    KVT_CHECK(to.status == PieceStatus::kOk, static_cast<int>(to.status));
    StoredRecord record{pushed.piece.handle, key.Hash64(),
                        static_cast<uint64_t>(to.data - arena_.data()),
                        static_cast<uint64_t>(plane)};
    FillRecordBytes(record, 0, geometry_.RecordBytes(), to.data);
    sums_.clear();
    for (uint32_t s = 0; s < geometry_.SlicesPerRecord(); ++s) {
      sums_.push_back(SliceChecksum(to.data + uint64_t{s} * geometry_.SliceBytes(),
                                    geometry_.SliceBytes(),
                                    ChecksumSeed(record.key_hash, plane, s)));
    }
    pushed.status = PieceStatus::kOk;
    pushed.checksums = sums_;
    PieceStatus verdict = PieceStatus::kOk;
    node_.CommitPush(session_.session, absl::MakeConstSpan(&pushed, 1),
                     absl::MakeSpan(&verdict, 1));
    KVT_CHECK(verdict == PieceStatus::kOk, static_cast<int>(verdict));
    if (ticket == kBenchTicket) mine_.push_back(record);
  }

  const Geometry geometry_;
  StoreNode& node_;
  Arena& arena_;
  std::unique_ptr<TicketSigner> signer_;
  OpenSessionReply session_;
  std::unique_ptr<KeyChain> chain_;
  BlockKey parent_;
  int32_t next_token_ = 1;
  std::vector<std::byte> buffer_;
  std::vector<uint64_t> sums_;
  std::vector<StoredRecord> mine_;
};

// A spill store in a folder of its own, and the thread that writes to it.
class Disk {
 public:
  explicit Disk(StoreNode& node) : node_(node) {
    KVT_CHECK(mkdtemp(folder_.data()) != nullptr, folder_);
    RocksDbSpillOptions options;
    options.folder = folder_ + "/spill";
    options.quota_bytes = kDiskBytes;
    options.direct_io = false;  // the folder may be a tmpfs
    store_ = OrDie(OpenRocksDbSpillStore(options));
    KVT_CHECK(node_.AttachDisk(*store_).ok());
    thread_ = std::thread([this] {
      while (!stopping_.load()) {
        if (!node_.SpillRound()) node_.WaitForSpill(absl::Milliseconds(200));
      }
    });
  }
  // Before the node goes, which outlives the thread but not the store.
  void Stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
  }
  ~Disk() {
    Stop();
    store_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

 private:
  StoreNode& node_;
  std::string folder_ = "/tmp/kvt-bench-spill-XXXXXX";
  std::unique_ptr<SpillStore> store_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

int StoreMain(const SizeCase& size, const StoreSettings& settings) {
  const int cpu = settings.pinned ? kStoreCpu : -1;
  if (settings.pinned) PinThisThread(kStoreCpu);
  StoreNodeConfig config;
  config.name = "bench-store";
  config.epoch = BootEpoch(1);
  config.host_id = "bench";
  config.lease = absl::Hours(2);
  config.has_disk = true;
  config.disk_bytes_max = kDiskBytes;
  config.spill_one_time = true;
  const uint64_t bytes = (settings.arena_mib > 0 ? settings.arena_mib : size.arena_mib) * kMiB;
  config.slab_bytes = RecordAllocator::SlabBytesFor(bytes);
  config.blocks_max = static_cast<uint32_t>(
      (bytes + kDiskBytes) / (uint64_t{kPlanes} * size.geometry().RecordBytes()) + 1);
  Arena arena = OrDie(Arena::Create(bytes, config.blocks_max * kPlanes));
  KVT_CHECK(arena.Populate(0, bytes).ok());
  StoreNode node(config, arena, RealClock::Get());
  Filler filler(size, node, arena);
  auto disk = std::make_unique<Disk>(node);
  filler.Fill();
  const uint64_t spilled = filler.FillDisk();

  UcxServerOptions ucx_options;
  ucx_options.ucx = UcxOf(settings, cpu);
  auto ucx = OrDie(StartUcxServer(ucx_options, arena.bytes(), node));
  ShmServerOptions shm_options;
  shm_options.socket_path = absl::StrCat("/tmp/kvt-bench-", getpid(), ".sock");
  shm_options.cpu = cpu;
  auto shm = OrDie(StartShmServer(shm_options, arena.mapping(), arena.table(), node));
  auto probe = OrDie(StartUcxLinkProbe(ucx_options));
  auto socket = OrDie(SocketServer::Start(arena.data(), arena.size(), kStoreCpu));
  std::printf("%s %s %s %d %d %llu %s %zu %llu\n", ucx->Address().c_str(), shm->Address().c_str(),
              probe->Address().c_str(), socket->port(), arena.mapping().fd(),
              static_cast<unsigned long long>(filler.session().session.value()),
              absl::BytesToHexString(filler.session().secret).c_str(), filler.mine().size(),
              static_cast<unsigned long long>(spilled));
  (void)std::fwrite(filler.mine().data(), sizeof(StoredRecord), filler.mine().size(), stdout);
  std::fflush(stdout);
  char byte = 0;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
    if (byte == 'c') {
      StartMallocCount();
      (void)!write(STDOUT_FILENO, "counting\n", 9);
    }
    if (byte != 'r') continue;
    const MallocCounts counts = StopMallocCount();
    std::printf("%llu %llu\n", static_cast<unsigned long long>(counts.ours),
                static_cast<unsigned long long>(counts.vendor));
    std::fflush(stdout);
  }
  return 0;  // the worker closed our input
}

bool ReadAll(int fd, void* out, size_t bytes) {
  auto* at = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = read(fd, at, bytes);
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

const SizeCase& CaseOf(const std::string& name) {
  for (const SizeCase& size : kCases) {
    if (size.name == name) return size;
  }
  KVT_CHECK(false, "no case ", name);
}

UcxOptions UcxOf(const StoreSettings& settings, int cpu) {
  UcxOptions options;
  options.poll_before_sleep = absl::Microseconds(settings.poll_us);
  options.tls = "tcp";
  options.net_devices = "lo";
  options.cpu = cpu;
  return options;
}

void FillRecordBytes(const StoredRecord& record, uint32_t from, uint32_t bytes, std::byte* out) {
  for (uint32_t at = 0; at < bytes; at += 8) {
    const uint64_t word = CounterRandom(record.key_hash + record.plane, from + at);
    std::memcpy(out + at, &word, 8);
  }
}

bool MaybeStoreMain(int argc, char** argv, int* exit_status) {
  if (argc < 2 || std::strcmp(argv[1], "--store") != 0) return false;
  StoreSettings settings;
  KVT_CHECK(argc == 6 && absl::SimpleAtoi(argv[3], &settings.poll_us) &&
            absl::SimpleAtoi(argv[5], &settings.arena_mib));
  settings.pinned = std::strcmp(argv[4], "pinned") == 0;
  *exit_status = StoreMain(CaseOf(argv[2]), settings);
  return true;
}

BenchStore::BenchStore(const SizeCase& size, const StoreSettings& settings) {
  int in[2];
  int out[2];
  KVT_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
  const std::string poll = absl::StrCat(settings.poll_us);
  const std::string mib = absl::StrCat(settings.arena_mib);
  pid_ = fork();
  KVT_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)dup2(in[0], STDIN_FILENO);
    (void)dup2(out[1], STDOUT_FILENO);
    execl("/proc/self/exe", "bench_store", "--store", size.name.c_str(), poll.c_str(),
          settings.pinned ? "pinned" : "free", mib.c_str(), nullptr);
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  in_ = in[1];
  out_ = out[0];
  const std::string line = ReadLine();
  const std::vector<std::string> fields = absl::StrSplit(line, ' ');
  KVT_CHECK(fields.size() == 9, "store said: ", line);
  ucx = fields[0];
  shm = fields[1];
  probe = fields[2];
  uint64_t session = 0;
  uint64_t count = 0;
  KVT_CHECK(absl::SimpleAtoi(fields[3], &socket_port) && absl::SimpleAtoi(fields[4], &arena_fd_) &&
            absl::SimpleAtoi(fields[5], &session) && absl::SimpleAtoi(fields[7], &count) &&
            absl::SimpleAtoi(fields[8], &spilled_records));
  token.session = SessionId(session);
  const std::string secret = absl::HexStringToBytes(fields[6]);
  KVT_CHECK(secret.size() == token.secret.size());
  std::memcpy(token.secret.data(), secret.data(), secret.size());
  token.geometry = size.geometry();
  records.resize(count);
  KVT_CHECK(ReadAll(out_, records.data(), count * sizeof(StoredRecord)));
  KVT_CHECK(clock_getcpuclockid(pid_, &clock_) == 0);
}

BenchStore::~BenchStore() {
  close(in_);
  close(out_);
  (void)waitpid(pid_, nullptr, 0);
}

std::string BenchStore::ReadLine() const {
  std::string line;
  char c = 0;
  while (read(out_, &c, 1) == 1 && c != '\n') line.push_back(c);
  return line;
}

double BenchStore::CpuSeconds() const {
  timespec ts{};
  KVT_CHECK(clock_gettime(clock_, &ts) == 0);
  return static_cast<double>(ts.tv_sec) + 1e-9 * static_cast<double>(ts.tv_nsec);
}

double BenchStore::Waited() const { return WaitedSeconds(pid_) + WaitedSeconds(getpid()); }

void BenchStore::Bind(bool pinned) const { BindProcess(pid_, pinned ? kStoreCpu : -1); }

SharedMapping BenchStore::MapArena() const {
  const std::string path = absl::StrCat("/proc/", pid_, "/fd/", arena_fd_);
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  KVT_CHECK(fd.valid(), path);
  return OrDie(SharedMapping::MapReadOnly(std::move(fd), SharedMappingOptions{}));
}

void BenchStore::StartMallocCount() {
  KVT_CHECK(write(in_, "c", 1) == 1);
  KVT_CHECK(ReadLine() == "counting");
}

MallocCounts BenchStore::StopMallocCount() {
  KVT_CHECK(write(in_, "r", 1) == 1);
  const std::vector<std::string> fields = absl::StrSplit(ReadLine(), ' ');
  MallocCounts counts;
  KVT_CHECK(fields.size() == 2 && absl::SimpleAtoi(fields[0], &counts.ours) &&
            absl::SimpleAtoi(fields[1], &counts.vendor));
  return counts;
}

}  // namespace kvt
