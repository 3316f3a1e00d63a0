#include "tests/contract/transport_fixture.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kvstore/transport/shm_transport.h"
#include "kvstore/transport/ucx_transport.h"

namespace kvt {
namespace {

std::string FreshSocketPath() {
  static std::atomic<int> next{0};
  return (std::filesystem::temp_directory_path() /
          absl::StrCat("kvt-transport-", getpid(), "-", next++, ".sock"))
      .string();
}

UcxOptions TestUcxOptions() {
  UcxOptions options;
  options.tls = "tcp";
  options.net_devices = "lo";
  return options;
}

// A victim in its own process.
class ProcessVictim final : public Victim {
 public:
  ProcessVictim(Backend backend, uint32_t records)
      : child_({"--serve", BackendName(backend), absl::StrCat(records)}, &address_) {}
  std::string Address() const override { return address_; }
  void Stop() override { child_.Signal(SIGSTOP); }
  void Continue() override { child_.Signal(SIGCONT); }
  void Kill() override { child_.Signal(SIGKILL); }

 private:
  std::string address_;
  Child child_;
};

class LoopbackVictim final : public Victim {
 public:
  explicit LoopbackVictim(uint32_t records) : resolver_(MakeResolver(records)) {
    for (uint32_t i = 0; i < records; ++i) (void)resolver_->Seal(i);
    auto server = StartLoopbackServer("victim", *resolver_);
    KVT_CHECK(server.ok(), server.status().ToString());
    server_ = std::move(*server);
  }
  std::string Address() const override { return server_->Address(); }
  void Stop() override { server_->Faults().SetStalled(true); }
  void Continue() override { server_->Faults().SetStalled(false); }
  void Kill() override { server_->Faults().Kill(); }

 private:
  std::unique_ptr<ArenaResolver> resolver_;
  std::unique_ptr<LoopbackServer> server_;
};

}  // namespace

std::string NameOf(const testing::TestParamInfo<Backend>& info) { return BackendName(info.param); }

std::string BackendName(Backend backend) {
  switch (backend) {
    case Backend::kLoopback:
      return "loopback";
    case Backend::kShm:
      return "shm";
    case Backend::kUcx:
      return "ucx";
  }
  return "?";
}

Geometry TestGeometry() {
  Geometry geometry;
  geometry.layers = 30;
  geometry.kv_heads = 3;
  geometry.head_dim = 64;
  return geometry;
}

SessionToken TestToken() {
  SessionToken token;
  token.session = SessionId(77);
  for (size_t i = 0; i < token.secret.size(); ++i) token.secret[i] = static_cast<uint8_t>(i * 7);
  token.geometry = TestGeometry();
  return token;
}

std::unique_ptr<ArenaResolver> MakeResolver(uint32_t records) {
  ArenaResolverOptions options;
  options.geometry = TestGeometry();
  options.records = records;
  options.token = TestToken();
  auto resolver = ArenaResolver::Create(options);
  KVT_CHECK(resolver.ok(), resolver.status().ToString());
  return std::move(*resolver);
}

std::unique_ptr<Transport> MakeTransport(Backend backend, TransportVersions versions) {
  switch (backend) {
    case Backend::kLoopback:
      return MakeLoopbackTransport(versions);
    case Backend::kShm: {
      ShmOptions options;
      options.versions = versions;
      return MakeShmTransport(options);
    }
    case Backend::kUcx: {
      UcxOptions options = TestUcxOptions();
      options.versions = versions;
      auto transport = MakeUcxTransport(options);
      KVT_CHECK(transport.ok(), transport.status().ToString());
      return std::move(*transport);
    }
  }
  return nullptr;
}

std::unique_ptr<TransportServer> StartServer(Backend backend, ArenaResolver& resolver,
                                             TransportVersions versions) {
  switch (backend) {
    case Backend::kLoopback: {
      static std::atomic<int> next{0};
      auto server = StartLoopbackServer(absl::StrCat("server-", next++), resolver, versions);
      KVT_CHECK(server.ok(), server.status().ToString());
      return std::move(*server);
    }
    case Backend::kShm: {
      ShmServerOptions options;
      options.socket_path = FreshSocketPath();
      options.versions = versions;
      auto server = StartShmServer(options, resolver.arena(), resolver.table(), resolver);
      KVT_CHECK(server.ok(), server.status().ToString());
      return std::move(*server);
    }
    case Backend::kUcx: {
      UcxServerOptions options;
      options.ucx = TestUcxOptions();
      options.ucx.versions = versions;
      auto server = StartUcxServer(
          options, absl::MakeSpan(resolver.arena().mutable_data(), resolver.arena().size()),
          resolver);
      KVT_CHECK(server.ok(), server.status().ToString());
      return std::move(*server);
    }
  }
  return nullptr;
}

std::unique_ptr<Victim> Victim::Start(Backend backend, uint32_t records) {
  if (backend == Backend::kLoopback) return std::make_unique<LoopbackVictim>(records);
  return std::make_unique<ProcessVictim>(backend, records);
}

Child::Child(std::vector<std::string> arguments, std::string* first_line,
             std::vector<std::string> through) {
  int ends[2];
  KVT_CHECK(pipe2(ends, O_CLOEXEC) == 0);
  std::vector<char*> argv;
  char path[4096] = {};
  KVT_CHECK(readlink("/proc/self/exe", path, sizeof(path) - 1) > 0);
  std::string self = path;
  for (std::string& word : through) argv.push_back(word.data());
  argv.push_back(self.data());
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  pid_ = fork();
  KVT_CHECK(pid_ >= 0);
  if (pid_ == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    (void)dup2(ends[1], STDOUT_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(ends[1]);
  out_ = ends[0];
  *first_line = ReadLine();
  KVT_CHECK(!first_line->empty(), "the child did not start");
}

Child::~Child() {
  (void)kill(pid_, SIGCONT);
  (void)kill(pid_, SIGKILL);
  (void)waitpid(pid_, nullptr, 0);
  close(out_);
}

void Child::Signal(int signal) {
  KVT_CHECK(kill(pid_, signal) == 0);
  // Stopped or dead before this returns.
  if (signal == SIGSTOP || signal == SIGKILL) {
    siginfo_t info{};
    const int what = signal == SIGSTOP ? WSTOPPED : WEXITED;
    (void)waitid(P_PID, static_cast<id_t>(pid_), &info, what | WNOWAIT);
  }
}

std::string Child::ReadLine() {
  std::string line;
  char c = 0;
  while (read(out_, &c, 1) == 1 && c != '\n') line.push_back(c);
  return line;
}

std::unique_ptr<Transport> MakeUcxTransportOver(const std::string& device) {
  UcxOptions options = TestUcxOptions();
  options.net_devices = device;
  auto transport = MakeUcxTransport(options);
  KVT_CHECK(transport.ok(), transport.status().ToString());
  return std::move(*transport);
}

int ServeAtMain(const UcxPlace& place, uint32_t records) {
  auto resolver = MakeResolver(records);
  for (uint32_t i = 0; i < records; ++i) (void)resolver->Seal(i);
  UcxServerOptions options;
  options.ucx = TestUcxOptions();
  options.ucx.net_devices = place.device;
  options.host = place.host;
  auto server = StartUcxServer(
      options, absl::MakeSpan(resolver->arena().mutable_data(), resolver->arena().size()),
      *resolver);
  KVT_CHECK(server.ok(), server.status().ToString());
  std::printf("%s\n", (*server)->Address().c_str());
  std::fflush(stdout);
  while (true) pause();  // until killed
}

int ServeMain(Backend backend, uint32_t records) {
  auto resolver = MakeResolver(records);
  for (uint32_t i = 0; i < records; ++i) (void)resolver->Seal(i);
  auto server = StartServer(backend, *resolver);
  std::printf("%s\n", server->Address().c_str());
  std::fflush(stdout);
  while (true) pause();  // until killed
}

int ClientMain(Backend backend, const std::string& address, uint32_t records) {
  auto transport = MakeTransport(backend);
  auto channel = transport->Connect(address, TestToken(), In(kPatience));
  if (!channel.ok()) {
    std::printf("%s\n", channel.status().ToString().c_str());
    return 1;
  }
  for (int round = 0;; ++round) {
    TestBurst burst(records, 1, TestGeometry().RecordBytes());
    for (uint32_t i = 0; i < records; ++i) burst.SetPiece(i, MakeRecordHandle(i, 1), 0);
    if (!burst.Pull(**channel, In(kPatience)).ok() || !burst.Await().status.ok()) return 1;
    if (round == 3) {
      std::printf("pulling\n");
      std::fflush(stdout);
    }
  }
}

TestBurst::TestBurst(uint32_t pieces, uint32_t parts_per_piece, uint32_t part_bytes)
    : parts_(parts_per_piece),
      part_bytes_(part_bytes),
      piece_bytes_(parts_per_piece * part_bytes),
      raw_(uint64_t{pieces} * piece_bytes_ + 64),
      pulls_(pieces),
      pushes_(pieces),
      statuses_(pieces),
      checksums_(pieces) {
  const auto base = reinterpret_cast<uintptr_t>(raw_.data());
  memory_ = raw_.data() + ((base + 63) / 64 * 64 - base);
  for (uint32_t i = 0; i < pieces * parts_; ++i) {
    part_pointers_.push_back(memory_ + uint64_t{i} * part_bytes);
  }
  for (uint32_t i = 0; i < pieces; ++i) {
    pulls_[i].parts = &part_pointers_[size_t{i} * parts_];
    pushes_[i].parts = &part_pointers_[size_t{i} * parts_];
    pulls_[i].part_bytes = pushes_[i].part_bytes = part_bytes;
  }
}

TestBurst::~TestBurst() {
  MutexLock lock(mu_);
  KVT_CHECK(!submitted_ || calls_ == 1, "callbacks ", calls_);
}

void TestBurst::SetPiece(uint32_t i, uint64_t handle, uint32_t offset) {
  Piece piece;
  piece.ticket = 1;
  piece.handle = handle;
  piece.offset = offset;
  piece.length = piece_bytes_;
  pulls_[i].piece = pushes_[i].piece = piece;
  pulls_[i].key_hash = pushes_[i].key_hash = ArenaResolver::KeyHash(RecordIndexOf(handle));
}

void TestBurst::SetChecksums(uint32_t i, uint32_t record, const std::vector<uint64_t>& of_record) {
  const uint32_t slice = TestGeometry().SliceBytes();
  const uint32_t first = pulls_[i].piece.offset / slice;
  checksums_[i].assign(of_record.begin() + first, of_record.begin() + first + piece_bytes_ / slice);
  pulls_[i].checksums = checksums_[i].data();
  pulls_[i].key_hash = ArenaResolver::KeyHash(record);
}

void TestBurst::FillSources(uint32_t i, uint32_t record, uint32_t generation) {
  std::vector<std::byte> pattern(TestGeometry().RecordBytes());
  ArenaResolver::FillPattern(record, generation, pattern.data(), TestGeometry().RecordBytes());
  std::memcpy(piece_bytes(i), pattern.data() + pushes_[i].piece.offset, piece_bytes_);
  checksums_[i].assign(piece_bytes_ / TestGeometry().SliceBytes(), 0);
  pushes_[i].checksums = checksums_[i].data();
}

bool TestBurst::Matches(uint32_t i, uint32_t record, uint32_t generation) {
  std::vector<std::byte> pattern(TestGeometry().RecordBytes());
  ArenaResolver::FillPattern(record, generation, pattern.data(), TestGeometry().RecordBytes());
  return std::memcmp(piece_bytes(i), pattern.data() + pulls_[i].piece.offset, piece_bytes_) == 0;
}

BurstDone TestBurst::MakeDone() {
  return [this](const BurstResult& result) {
    MutexLock lock(mu_);
    ++calls_;
    result_ = result;
    changed_.NotifyAll();
  };
}

absl::StatusOr<BurstId> TestBurst::Pull(Channel& channel, absl::Time deadline) {
  PullRequest request;
  request.items = pulls_;
  request.statuses = absl::MakeSpan(statuses_);
  request.deadline = deadline;
  request.done = MakeDone();
  auto id = channel.Pull(std::move(request));
  submitted_ = id.ok();
  return id;
}

absl::StatusOr<BurstId> TestBurst::Push(Channel& channel, absl::Time deadline,
                                        PushChecksums checksums) {
  PushRequest request;
  request.items = pushes_;
  request.statuses = absl::MakeSpan(statuses_);
  request.checksums = checksums;
  request.deadline = deadline;
  request.done = MakeDone();
  auto id = channel.Push(std::move(request));
  submitted_ = id.ok();
  return id;
}

BurstResult TestBurst::Await() {
  const absl::Time end = In(kPatience * 2);
  MutexLock lock(mu_);
  while (calls_ == 0 && RealClock::Get().Now() < end) changed_.WaitFor(mu_, absl::Seconds(1));
  KVT_CHECK(calls_ == 1, "callbacks ", calls_);
  return result_;
}

bool TestBurst::done() {
  MutexLock lock(mu_);
  return calls_ > 0;
}

}  // namespace kvt
