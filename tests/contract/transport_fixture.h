// What the transport's contract tests share: backends by name, helper processes, bursts that can be
// waited for.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/base/clock.h"
#include "kernels/base/mutex.h"
#include "kvstore/transport/loopback.h"
#include "kvstore/transport/transport.h"
#include "kvstore/transport/transport_server.h"
#include "tests/support/arena_resolver.h"

namespace kvt {

enum class Backend { kLoopback, kShm, kUcx };
std::string BackendName(Backend backend);

// L30 H3 D64, as SmolLM2's: slots of 6 KiB, records of 180 KiB.
Geometry TestGeometry();
SessionToken TestToken();
std::unique_ptr<ArenaResolver> MakeResolver(uint32_t records);

// `versions`: what that end claims to speak.
std::unique_ptr<Transport> MakeTransport(Backend backend, TransportVersions versions = {});
std::unique_ptr<Transport> MakeUcxTransportOver(const std::string& device);
std::unique_ptr<TransportServer> StartServer(Backend backend, ArenaResolver& resolver,
                                             TransportVersions versions = {});

inline absl::Time In(absl::Duration d) { return RealClock::Get().Now() + d; }
// Long enough for any operation that should succeed, on a loaded machine, under a sanitizer.
inline constexpr absl::Duration kPatience = absl::Seconds(60);

// A store that can be stopped and killed: another process (this program with --serve), or a
// loopback server with its faults. Its records 0 to records-1 are sealed, generation 1.
class Victim {
 public:
  virtual ~Victim() = default;
  [[nodiscard]] virtual std::string Address() const = 0;
  virtual void Stop() = 0;
  virtual void Continue() = 0;
  virtual void Kill() = 0;
  static std::unique_ptr<Victim> Start(Backend backend, uint32_t records);
};

// A child process: this program with other arguments. Killed and reaped at its end.
class Child {
 public:
  // Starts it and reads one line of its output. `through`: a program, by its full path, and
  // arguments that execute the rest of their command line.
  Child(std::vector<std::string> arguments, std::string* first_line,
        std::vector<std::string> through = {});
  ~Child();
  void Signal(int signal);
  // Reads another line; empty when the child is gone.
  std::string ReadLine();

 private:
  pid_t pid_ = -1;
  int out_ = -1;
};

// Where a UCX server listens, and over which device.
struct UcxPlace {
  std::string host = "127.0.0.1";
  std::string device = "lo";
};

// Entry points of the children; return the exit status.
int ServeMain(Backend backend, uint32_t records);
int ServeAtMain(const UcxPlace& place, uint32_t records);
int ClientMain(Backend backend, const std::string& address, uint32_t records);

// One pull or push with all its memory. Await before destruction.
class TestBurst {
 public:
  // `parts_per_piece` destinations or sources per piece, of `part_bytes` each.
  TestBurst(uint32_t pieces, uint32_t parts_per_piece, uint32_t part_bytes);
  ~TestBurst();

  PullItem& pull(uint32_t i) { return pulls_[i]; }
  PushItem& push(uint32_t i) { return pushes_[i]; }
  // Item i covers [offset, +parts * part_bytes) of the record.
  void SetPiece(uint32_t i, uint64_t handle, uint32_t offset);
  void SetChecksums(uint32_t i, uint32_t record, const std::vector<uint64_t>& of_record);
  // Sources hold what the record's pattern is.
  void FillSources(uint32_t i, uint32_t record, uint32_t generation);
  std::byte* piece_bytes(uint32_t i) { return memory_ + uint64_t{i} * piece_bytes_; }
  // Whether piece i's destinations hold the record's pattern.
  bool Matches(uint32_t i, uint32_t record, uint32_t generation);

  absl::StatusOr<BurstId> Pull(Channel& channel, absl::Time deadline);
  absl::StatusOr<BurstId> Push(Channel& channel, absl::Time deadline, PushChecksums checksums);
  // The result; fails the test when it does not come in time.
  BurstResult Await();
  [[nodiscard]] bool done();
  [[nodiscard]] PieceStatus status(uint32_t i) const { return statuses_[i]; }
  std::vector<uint64_t>& checksums(uint32_t i) { return checksums_[i]; }

 private:
  BurstDone MakeDone();

  const uint32_t parts_;
  const uint32_t part_bytes_;
  const uint32_t piece_bytes_;
  std::vector<std::byte> raw_;
  std::byte* memory_;
  std::vector<std::byte*> part_pointers_;
  std::vector<PullItem> pulls_;
  std::vector<PushItem> pushes_;
  std::vector<PieceStatus> statuses_;
  std::vector<std::vector<uint64_t>> checksums_;
  Mutex mu_;
  CondVar changed_;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  bool submitted_ = false;
  BurstResult result_ ABSL_GUARDED_BY(mu_);
};

// A test over one backend.
class TransportTest : public testing::TestWithParam<Backend> {
 protected:
  // A server in this process with `records` sealed records, and one channel to it.
  void StartHere(uint32_t records) {
    resolver_ = MakeResolver(records);
    for (uint32_t i = 0; i < records; ++i) handles_.push_back(resolver_->Seal(i));
    server_ = StartServer(GetParam(), *resolver_);
    transport_ = MakeTransport(GetParam());
    Connect();
  }
  void Connect() {
    auto channel = transport_->Connect(server_->Address(), TestToken(), In(kPatience));
    ASSERT_TRUE(channel.ok()) << channel.status();
    channel_ = std::move(*channel);
  }
  void StartVictim(uint32_t records) {
    victim_ = Victim::Start(GetParam(), records);
    transport_ = MakeTransport(GetParam());
    auto channel = transport_->Connect(victim_->Address(), TestToken(), In(kPatience));
    ASSERT_TRUE(channel.ok()) << channel.status();
    channel_ = std::move(*channel);
    for (uint32_t i = 0; i < records; ++i) handles_.push_back(MakeRecordHandle(i, 1));
  }

  std::unique_ptr<ArenaResolver> resolver_;
  std::unique_ptr<Victim> victim_;
  std::unique_ptr<TransportServer> server_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Channel> channel_;
  std::vector<uint64_t> handles_;
};

inline constexpr uint32_t kSlot = 6144;  // TestGeometry().SlotBytes()

std::string NameOf(const testing::TestParamInfo<Backend>& info);

}  // namespace kvt
